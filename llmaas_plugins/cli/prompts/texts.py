"""Texts with their summaries, to learn from."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING

from llmaas_hooks import ConfigError
from llmaas_plugins.cli.files import json_lines

if TYPE_CHECKING:
    from llmaas_plugins.training.word_labels import Labeled

__all__ = ["summarized"]


def summarized(path: Path, most: int) -> list[Labeled]:
    """Return the first texts of a JSONL file; words that their summaries have are kept.

    Raises:
        ConfigError: The file cannot be read, or a line is no text with a summary.
    """
    from llmaas_plugins.short_prompts.encoder.labels import kept_words, words_of
    from llmaas_plugins.training.word_labels import Labeled

    found = list[Labeled]()
    for where, row in itertools.islice(json_lines(path), most):
        text, summary = _row(where, row)
        words = words_of(text)
        found.append(Labeled(words, kept_words(words, words_of(summary))))
    return found


# -- internals -----------------------------------------------------------------------------------


def _row(where: str, row: object) -> tuple[str, str]:
    fields = row if isinstance(row, dict) else {}
    text, summary = fields.get("text"), fields.get("summary")
    if not isinstance(text, str) or not isinstance(summary, str):
        raise ConfigError(
            f'{where}: expected an object with two texts, {{"text": "…", "summary": "…"}}.'
        )
    return text, summary

"""Texts to learn from: files, packaged texts, or texts with their summaries."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from llmaas_hooks import ConfigError
from llmaas_plugins.cli.files import content_of
from llmaas_plugins.cli.given_text import packaged_conversations
from llmaas_plugins.files.json_text import parse_json

if TYPE_CHECKING:
    from llmaas_plugins.training.word_labels import Labeled

__all__ = ["plain_texts", "summarized"]


def plain_texts(paths: Sequence[Path] | None) -> list[str]:
    """Return the given texts, or the packaged texts and conversations.

    Raises:
        ConfigError: A file cannot be read.
    """
    from llmaas_plugins.elastic.calibration import packaged_texts

    if paths:
        return [content_of(path).decode(errors="replace") for path in paths]
    return [*packaged_texts().values(), *packaged_conversations()]


def summarized(path: Path, most: int) -> list[Labeled]:
    """Return the first texts of a JSONL file; words that their summaries have are kept.

    Raises:
        ConfigError: The file cannot be read, or a line is no text with a summary.
    """
    from llmaas_plugins.short_prompts.encoder.labels import kept_words, words_of
    from llmaas_plugins.training.word_labels import Labeled

    found = list[Labeled]()
    for number, line in enumerate(content_of(path).splitlines(), 1):
        if line.strip() and len(found) < most:
            text, summary = _row(path, number, line)
            words = words_of(text)
            found.append(Labeled(words, kept_words(words, words_of(summary))))
    return found


# -- internals -----------------------------------------------------------------------------------


def _row(path: Path, number: int, line: bytes) -> tuple[str, str]:
    try:
        row = parse_json(line)
    except ValueError as error:
        raise ConfigError(f"{path}, line {number}: {error}. Each line must be JSON.") from error
    row = row if isinstance(row, dict) else {}
    text, summary = row.get("text"), row.get("summary")
    if not isinstance(text, str) or not isinstance(summary, str):
        raise ConfigError(
            f'{path}, line {number}: expected an object with two texts, {{"text": "…", "summary": '
            '"…"}.'
        )
    return text, summary

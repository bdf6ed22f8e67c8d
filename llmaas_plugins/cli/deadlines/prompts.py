"""Prompts to compare answers to: an app's own, or parts of texts."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmaas_hooks import ConfigError
from llmaas_plugins.cli.files import json_lines
from llmaas_plugins.cli.given_text import prompt_texts, tokens_of
from llmaas_plugins.cli.models import trained_context

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llmaas_hooks import Tokens

__all__ = ["check_prompts", "prompts_of"]

_LONG = (256, 512)
"""Tokens of prompts that are worth shortening; ``short_prompts`` leaves others whole."""
_LEAST = 20
"""Fewest prompts: fewer say nothing."""


def prompts_of(args: argparse.Namespace, model: Any, n_prompts: int) -> list[Tokens]:
    """Return up to ``n_prompts`` prompts: the app's, or parts of the text.

    Raises:
        ConfigError: There are too few prompts, or a file cannot be read.
    """
    import numpy as np

    from llmaas_plugins.deadlines.learning import LENGTHS, cut_prompts

    if args.prompts:
        chance, found = np.random.default_rng(0), _own(args.prompts, model)
        found = [found[i] for i in chance.permutation(len(found))[:n_prompts]]
    else:
        texts = [tokens_of(text, model) for text in prompt_texts(args.text)]
        start, lengths = model.tokenize(b"", True, False), LENGTHS
        if args.shares:
            most = (trained_context(args.model) or math.inf) - len(start) - args.answer_tokens
            lengths += tuple(length for length in _LONG if length <= most)
        found = cut_prompts(texts, n_prompts, start, lengths)
    if len(found) < _LEAST:
        raise ConfigError(
            f"found {len(found)} prompts, expected at least {_LEAST}. Give more text with --text, "
            "or more prompts with --prompts."
        )
    return found


def check_prompts(prompts: Sequence[Tokens], n_answer: int, n_trained: int | None) -> None:
    """Refuse prompts that are longer than the model's context.

    Raises:
        ConfigError: A prompt and its answer do not fit.
    """
    longest = max(map(len, prompts)) + n_answer
    if n_trained is not None and longest > n_trained:
        raise ConfigError(
            f"the longest prompt and its answer have {longest:,} tokens, expected at most the "
            f"{n_trained:,} tokens with which the model was trained. Leave longer prompts out."
        )


# -- internals -----------------------------------------------------------------------------------


def _own(path: Path, model: Any) -> list[Tokens]:
    """Return the prompts of a JSONL file, as a completion would evaluate them."""
    import numpy as np

    found = []
    for where, row in json_lines(path):
        tokens = model.tokenize(_prompt(where, row), True, True)
        if tokens:
            found.append(np.array(tokens, np.int32))
    return found


def _prompt(where: str, row: object) -> bytes:
    prompt = row.get("prompt") if isinstance(row, dict) else None
    if not isinstance(prompt, str):
        raise ConfigError(f'{where}: expected an object with a text, {{"prompt": "…"}}.')
    try:
        return prompt.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{where}: {error.reason}.") from error

"""Scorers of words by name: those of ``short_prompts``, a trained encoder's, and an oracle's."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmaas_eval.prompts.engine import Engine
from llmaas_hooks import ConfigError, Tokens
from llmaas_plugins.model.digest import file_digest
from llmaas_plugins.short_prompts.encoder.model_file import find_encoder
from llmaas_plugins.short_prompts.scorer import Prompt
from llmaas_plugins.short_prompts.scorer import Scorer as PluginScorer
from llmaas_plugins.short_prompts.scorers import SCORERS as PLUGIN_SCORERS
from llmaas_plugins.short_prompts.scorers.encoder import EncoderScorer

__all__ = [
    "ENCODER",
    "NAMES",
    "ORACLE",
    "UNTRAINED",
    "WHOLE_MODEL",
    "Material",
    "Scorer",
    "by_word",
    "encoder_of",
    "scorers_of",
]

Scores = NDArray[np.float32]

WHOLE_MODEL = "self_information, whole model"
"""Selective Context's scores: surprise under the whole model, and not its narrowest level."""
ENCODER = "encoder"
ORACLE = "gradient oracle"
"""Scores of a scorer that knows the answer."""


class Material(NamedTuple):
    """All that a scorer may use, besides the prompt.

    Attributes:
        engine: The model that will read the prompt.
        answer: Tokens of the right answer; only the oracle looks at them.
    """

    engine: Engine
    answer: Tokens


Scorer = Callable[[Prompt, Material], Scores]
"""Function that returns a number for each word; words with large ones are kept."""


def scorers_of(engine: Engine, names: Sequence[str]) -> dict[str, Scorer]:
    """Return the scorers of a model by name.

    Args:
        engine: The model.
        names: Names, of ``NAMES``.

    Raises:
        ConfigError: An encoder is named, and none was trained.
    """
    found = {
        name: _plugged(make(engine.natives))
        for name, make in PLUGIN_SCORERS.items()
        if name in names
    }
    if ENCODER in names:
        found[ENCODER] = _plugged(EncoderScorer(encoder_of(engine.path)))
    return {name: found.get(name) or _OWN[name] for name in names}


def encoder_of(model: Path) -> Path:
    """Return the encoder that learned from this model's answers, or else the general one.

    Raises:
        ConfigError: None was trained.
    """
    path = find_encoder(file_digest(model))
    if path is None:
        raise ConfigError(
            "no encoder was trained: see `llmaas prompts learn --help`, or leave it out with "
            "--scorers."
        )
    return path


def by_word(prompt: Prompt, values: NDArray[np.floating[Any]]) -> Scores:
    """Return the mean of the tokens' values by word."""
    sums = np.add.reduceat(values.astype(np.float64), prompt.starts[:-1])
    return (sums / np.diff(prompt.starts)).astype(np.float32)


# -- inside --------------------------------------------------------------------------------------


def _plugged(scorer: PluginScorer) -> Scorer:
    return lambda prompt, material: scorer.scores(prompt, material.engine.llama)


def _surprise(prompt: Prompt, material: Material) -> Scores:
    """Return the mean surprise of each word's tokens, as Selective Context does by phrase."""
    log_p = material.engine.read(prompt.tokens)
    nats = -log_p[np.arange(len(prompt.tokens) - 1), prompt.tokens[1:]]
    return by_word(prompt, np.concatenate([[0.0], nats]))


def _gradient(prompt: Prompt, material: Material) -> Scores:
    """Return how much the answer's likelihood would fall without a word, to first order."""
    from llmaas_eval.prompts.gradient import influences

    decoder = _decoder(material.engine.path)
    return by_word(prompt, influences(decoder, prompt.tokens, material.answer))


@functools.cache
def _decoder(path: Path) -> Any:
    import torch

    from llmaas_eval.prompts.gradient import KeptDecoder

    torch.set_num_threads(1)  # as the engine
    return KeptDecoder(path)


_OWN: Mapping[str, Scorer] = {WHOLE_MODEL: _surprise, ORACLE: _gradient}
UNTRAINED = (*PLUGIN_SCORERS, *_OWN)
"""Scorers that need no trained encoder."""
NAMES = (*UNTRAINED, ENCODER)
"""All scorers."""

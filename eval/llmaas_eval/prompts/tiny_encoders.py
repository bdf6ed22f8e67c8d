"""Tiny models of several sizes that learn which words to keep (ElastiLM Figs 13a and 18b)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from llmaas_eval.measured import measured_once
from llmaas_plugins.short_prompts.encoder.body import Body, layer_of
from llmaas_plugins.short_prompts.encoder.labels import kept_words, words_of
from llmaas_plugins.short_prompts.encoder.model_file import EncoderFile
from llmaas_plugins.training.word_labels import Labeled, Recipe, auc, examples_of, judge, learn

__all__ = ["ALL_TRAINED", "DEFAULT", "SIZES", "Encoder", "Size", "encoder_of", "labeled"]


class Size(NamedTuple):
    """Shape of a tiny model.

    Attributes:
        n_layers: Number of its layers, the first ones of the pretrained encoder.
        n_shared: Number of its first layers that stay as they are, so that both heads share them.
    """

    n_layers: int
    n_shared: int

    def __str__(self) -> str:
        """Return its name in tables."""
        return f"{self.n_layers} layers, {self.n_shared} shared"


DEFAULT, ALL_TRAINED = Size(6, 3), Size(6, 0)
"""The plugin's encoder, half of which is shared as in the paper; all of it learns in LLMLingua-2's
way."""
SIZES = (DEFAULT, ALL_TRAINED, Size(6, 5), Size(4, 2), Size(2, 1))


class Encoder(NamedTuple):
    """Tiny model that learned.

    Attributes:
        size: Its shape.
        path: Its file.
        n_active: Weights that take part in each product with a word piece.
        auc: How often a word that is kept has a larger score than another, in texts held out.
    """

    size: Size
    path: Path
    n_active: int
    auc: float


def labeled(data: Path, most: int) -> list[Labeled]:
    """Return dialogues whose words are kept if their summary has them.

    They are of another set than those that scorers are judged by.

    Args:
        data: Folder of the data sets.
        most: Number of dialogues.
    """
    found = []
    for row in _rows(data / "tasks" / "dialogsum_dev.jsonl"):
        words = words_of(row["dialogue"])
        found.append(Labeled(words, kept_words(words, words_of(row["summary"]))))
    return found[:most]


def encoder_of(size: Size, body: Body, texts: Sequence[Labeled], folder: Path) -> Encoder:
    """Return a tiny model that learned from texts; one that the folder has does not learn again.

    Args:
        size: Its shape.
        body: The pretrained encoder.
        texts: Texts with labels; an eighth of them is held out.
        folder: Folder for its file.

    Raises:
        ConfigError: Learning diverged, or there are too few texts.
        StoreError: The file cannot be written.
    """
    recipe = Recipe(epochs=1.0, n_trained=size.n_layers - size.n_shared)
    name = hashlib.sha256(json.dumps([body.digest, texts, recipe.n_rows]).encode()).hexdigest()
    path = folder / f"encoder-{size.n_layers}-{size.n_shared}-{name[:12]}.gguf"
    some = _first_layers(body, size.n_layers)
    about = {"encoder": path.name, "recipe": repr(recipe)}
    found = measured_once(folder, about, lambda: _learned(path, some, texts, recipe))
    n_active = sum(
        one.size for layer, one in some.weights.items() if layer_of(layer) >= 0 and one.ndim == 2
    )
    return Encoder(size, path, n_active, found["auc"])


# -- inside --------------------------------------------------------------------------------------


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        yield from map(json.loads, file)


def _first_layers(body: Body, n: int) -> Body:
    weights = {name: one for name, one in body.weights.items() if layer_of(name) < n}
    return Body(weights, body.vocabulary, body.digest)


def _learned(path: Path, body: Body, texts: Sequence[Labeled], recipe: Recipe) -> dict[str, float]:
    examples = examples_of(texts, body)
    bert = learn(body, examples.training, recipe)
    EncoderFile.write(path, body, bert.trained_weights(), bert.head())
    return {"auc": auc(judge(bert, body, examples.held_out), examples.held_out)}

"""Other methods to shrink a model, measured at equal bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from llmaas_eval.batches import loaded
from llmaas_eval.elastic.engine import Variant
from llmaas_eval.elastic.measuring import Measuring
from llmaas_eval.elastic.prepared import by_weight
from llmaas_eval.elastic.readings import Reading, mean_reading, mixed
from llmaas_eval.elastic.rows import INTERPOLATED, OURS, Row
from llmaas_eval.elastic.scores import (
    layers_to_drop,
    llm_pruner_scores,
    magnitude_scores,
    random_scores,
)
from llmaas_eval.elastic.sizes import kept_layers
from llmaas_plugins import activate
from llmaas_plugins.elastic.compensation import biases_of
from llmaas_plugins.elastic.fluctuation import (
    ChannelMoments,
    Watcher,
    calibration_of,
    fluctuation_scores,
)
from llmaas_plugins.elastic.uniform import step_of, uniform_widths
from llmaas_plugins.elastic.units import Blocks, without_layers
from llmaas_plugins.model.forward import Evaluator

__all__ = ["METHODS", "rows_of_layers"]

_N_SEEDS = 5


def rows_of_layers(
    name: str,
    blocks: Blocks,
    levels: Sequence[float],
    by_kept: Mapping[int, Reading],
) -> Iterator[Row]:
    """Yield rows of a method that removes whole layers, at the bytes of each level.

    A number of whole layers seldom has exactly those bytes. So there is one row for the next larger
    number of layers, in the method's favor. A second row interpolates between that and one layer
    fewer.

    Args:
        name: Name of the method.
        blocks: Units of the model.
        levels: Shares of the bytes of the blocks' units.
        by_kept: The method's readings by the number of kept layers.
    """
    for level in levels:
        kept = kept_layers(blocks, level)
        most = by_kept[kept.n]
        yield Row(name, level, kept.n / blocks.n_layers, most)
        if kept.n > 1:
            between = mixed(by_kept[kept.n - 1], most, kept.share)
            share = (kept.n - 1 + kept.share) / blocks.n_layers
            yield Row(name + INTERPOLATED, level, share, between)


def _random(measuring: Measuring, name: str) -> list[Row]:
    """Measure random orders; return their mean, and the best of them at each level."""
    blocks, rows = measuring.blocks, list[Row]()
    seeds = [measuring.ordered(name, random_scores(blocks, seed)) for seed in range(_N_SEEDS)]
    for of_level in zip(*seeds, strict=True):
        mean = mean_reading([row.reading for row in of_level])
        best = min(of_level, key=lambda row: float(row.reading.nats.mean()))
        rows += [of_level[0]._replace(reading=mean), best._replace(method=f"{name}, best")]
    return rows


def _first_order(measuring: Measuring, name: str) -> list[Row]:
    """Measure the paper's importance (Eq 2) at our widths."""
    from llmaas_plugins.elastic.gradients import gradient_scores

    source, windows = measuring.of.source, measuring.calibration
    return measuring.ordered(name, gradient_scores(source, windows, method="taylor"))


def _fluctuation(measuring: Measuring, name: str) -> list[Row]:
    """Measure importance by activation fluctuation, which needs only the engine, at our widths."""
    source, blocks, text = measuring.of.source, measuring.blocks, measuring.calibration.ravel()
    moments = _moments(measuring, source)
    about = calibration_of(text, 0, len(text), name)
    return measuring.ordered(name, fluctuation_scores(source, blocks, moments, about))


def _mean_biases(measuring: Measuring, name: str) -> list[Row]:
    """Measure our levels with the mean of the omitted output added back as biases (FLAP)."""
    path, rows = measuring.of.prepared, list[Row]()
    moments = _moments(measuring, path)
    for table in filter(measuring.ours.__contains__, OURS):
        ours = measuring.ours[table]
        biases = by_weight(biases_of(path, measuring.blocks, ours.levels, moments))
        variant = Variant(path, measuring.blocks, ours.levels, biases)
        rows += measuring.rows(f"{name}, {table}", variant)
    return rows


def _moments(measuring: Measuring, path: Path) -> ChannelMoments:
    text, watcher = measuring.calibration.ravel(), Watcher(measuring.blocks)
    with (
        activate({"plugins": {}, "on_error": "raise"}, {"watcher": watcher}),
        loaded(path) as model,
        Evaluator(model, n_threads=1) as evaluator,
    ):
        return watcher.moments(evaluator, list(evaluator.chosen(text, len(text))))


def _magnitude(measuring: Measuring, name: str) -> list[Row]:
    """Measure units in order of weight magnitude, largest first, at our widths."""
    return measuring.ordered(name, magnitude_scores(measuring.of.source))


def _llm_pruner(measuring: Measuring, name: str) -> list[Row]:
    """Measure LLM-Pruner's order at our widths, and with the first and last layer left whole."""
    blocks, levels = measuring.blocks, measuring.of.levels
    scores = llm_pruner_scores(measuring.of.source, measuring.calibration)
    ends = np.zeros(blocks.n_layers)
    ends[[0, -1]] = 1
    own = uniform_widths(blocks, levels, ends, step_of(blocks))
    return measuring.ordered(name, scores) + measuring.ordered(f"{name}, own layers", scores, own)


def _shortgpt(measuring: Measuring, name: str) -> list[Row]:
    """Measure ShortGPT: the layers that change their input least are removed first."""
    source, blocks = measuring.of.source, measuring.blocks
    order = layers_to_drop(source, measuring.calibration)
    kept = range(blocks.n_layers, 0, -1)
    removed = [without_layers(blocks, order[: blocks.n_layers - n]) for n in kept]
    found = measuring.read(name, Variant(source, blocks, removed))
    return _layers(measuring, name, dict(zip(kept, found, strict=True)))


def _laco(measuring: Measuring, name: str) -> list[Row]:
    """Measure LaCo: layers are merged into the layer before them."""
    from llmaas_eval.elastic.laco import write_merged

    by_kept = {measuring.blocks.n_layers: measuring.full.reading}
    for n in range(1, measuring.blocks.n_layers):
        path = measuring.of.folder / f"{name} {n}.gguf"
        write_merged(measuring.of.source, path, n, measuring.calibration)
        (by_kept[n],) = measuring.read(f"{name} {n}", Variant(path))
        path.unlink()
    return _layers(measuring, name, by_kept)


def _layers(measuring: Measuring, name: str, by_kept: Mapping[int, Reading]) -> list[Row]:
    return list(rows_of_layers(name, measuring.blocks, measuring.of.levels, by_kept))


METHODS: Mapping[str, Callable[[Measuring, str], list[Row]]] = {
    "random": _random,
    "magnitude": _magnitude,
    "first order": _first_order,
    "fluctuation": _fluctuation,
    "mean biases": _mean_biases,
    "LLM-Pruner": _llm_pruner,
    "ShortGPT": _shortgpt,
    "LaCo": _laco,
}
"""Function that measures each method, by the method's name."""

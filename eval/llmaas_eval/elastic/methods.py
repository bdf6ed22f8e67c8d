"""Other ways to shrink a model to as many bytes."""

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
from llmaas_eval.elastic.sizes import kept_layers, kv_bytes
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
from llmaas_plugins.evaluating import Evaluator

__all__ = ["METHODS", "rows_of_layers"]

_N_SEEDS = 5


def rows_of_layers(
    name: str,
    blocks: Blocks,
    n_kv_bytes: int,
    levels: Sequence[float],
    by_kept: Mapping[int, Reading],
) -> Iterator[Row]:
    """Whole layers, for as many bytes as each level has.

    They seldom come to as many. So there is a row of the next larger number of layers, in the
    method's favour, and one between that and the next smaller.

    Args:
        name: Of the method.
        blocks: Of the model.
        n_kv_bytes: Of its K and V projections, which go with their layers.
        levels: Shares of the blocks' bytes, without those.
        by_kept: How it reads, by the number of layers that are kept.
    """
    for level in levels:
        kept = kept_layers(blocks, n_kv_bytes, level)
        most = by_kept[kept.n]
        yield Row(name, level, kept.n / blocks.n_layers, most)
        if kept.n > 1:
            between = mixed(by_kept[kept.n - 1], most, kept.share)
            share = (kept.n - 1 + kept.share) / blocks.n_layers
            yield Row(name + INTERPOLATED, level, share, between)


def _random(measuring: Measuring, name: str) -> list[Row]:
    """Mean of several orders, and at each level the best of them."""
    blocks, rows = measuring.blocks, list[Row]()
    seeds = [measuring.ordered(name, random_scores(blocks, seed)) for seed in range(_N_SEEDS)]
    for of_level in zip(*seeds, strict=True):
        mean = mean_reading([row.reading for row in of_level])
        best = min(of_level, key=lambda row: float(row.reading.nats.mean()))
        rows += [of_level[0]._replace(reading=mean), best._replace(method=f"{name}, best")]
    return rows


def _first_order(measuring: Measuring, name: str) -> list[Row]:
    """The paper's importance (Eq 2), in our widths."""
    from llmaas_plugins.elastic.gradients import gradient_scores

    source, windows = measuring.of.source, measuring.calibration
    return measuring.ordered(name, gradient_scores(source, windows, method="taylor"))


def _fluctuation(measuring: Measuring, name: str) -> list[Row]:
    """What the engine alone tells of importance, in our widths."""
    source, blocks, text = measuring.of.source, measuring.blocks, measuring.calibration.ravel()
    moments = _moments(measuring, source)
    about = calibration_of(text, 0, len(text), name)
    return measuring.ordered(name, fluctuation_scores(source, blocks, moments, about))


def _mean_biases(measuring: Measuring, name: str) -> list[Row]:
    """Ours, with the mean of what a level leaves out put back at all levels, as FLAP does."""
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
        return watcher.moments(evaluator, text, len(text))


def _magnitude(measuring: Measuring, name: str) -> list[Row]:
    """Units with the largest weights first, in our widths."""
    return measuring.ordered(name, magnitude_scores(measuring.of.source))


def _llm_pruner(measuring: Measuring, name: str) -> list[Row]:
    """Its order in our widths; and with its own layers left whole, the first and the last ones."""
    blocks, levels = measuring.blocks, measuring.of.levels
    scores = llm_pruner_scores(measuring.of.source, measuring.calibration)
    ends = np.zeros(blocks.n_layers)
    ends[[0, -1]] = 1
    own = uniform_widths(blocks, levels, ends, step_of(blocks))
    return measuring.ordered(name, scores) + measuring.ordered(f"{name}, own layers", scores, own)


def _shortgpt(measuring: Measuring, name: str) -> list[Row]:
    """Layers that change their input least are removed first."""
    source, blocks = measuring.of.source, measuring.blocks
    order = layers_to_drop(source, measuring.calibration)
    kept = range(blocks.n_layers, 0, -1)
    removed = [without_layers(blocks, order[: blocks.n_layers - n]) for n in kept]
    found = measuring.read(name, Variant(source, blocks, removed))
    return _layers(measuring, name, dict(zip(kept, found, strict=True)))


def _laco(measuring: Measuring, name: str) -> list[Row]:
    """Layers are merged into the one before them."""
    from llmaas_eval.elastic.laco import write_merged

    by_kept = {measuring.blocks.n_layers: measuring.full.reading}
    for n in range(1, measuring.blocks.n_layers):
        path = measuring.of.folder / f"{name} {n}.gguf"
        write_merged(measuring.of.source, path, n, measuring.calibration)
        (by_kept[n],) = measuring.read(f"{name} {n}", Variant(path))
        path.unlink()
    return _layers(measuring, name, by_kept)


def _layers(measuring: Measuring, name: str, by_kept: Mapping[int, Reading]) -> list[Row]:
    of = measuring.of
    return list(rows_of_layers(name, measuring.blocks, kv_bytes(of.source), of.levels, by_kept))


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
"""By name."""

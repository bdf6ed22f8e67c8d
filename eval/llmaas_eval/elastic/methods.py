"""Other ways to shrink a model to as many bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from llmaas_eval.elastic.engine import Variant
from llmaas_eval.elastic.measuring import Measuring
from llmaas_eval.elastic.readings import mean_reading
from llmaas_eval.elastic.rows import Row
from llmaas_eval.elastic.scores import (
    layers_to_drop,
    llm_pruner_scores,
    magnitude_scores,
    random_scores,
)
from llmaas_eval.elastic.sizes import without_layers
from llmaas_plugins.elastic.uniform import step_of, uniform_widths

__all__ = ["METHODS"]

_N_SEEDS = 5


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

    of = measuring.of
    return measuring.ordered(name, gradient_scores(of.source, of.calibration, method="taylor"))


def _magnitude(measuring: Measuring, name: str) -> list[Row]:
    """Units with the largest weights first, in our widths."""
    return measuring.ordered(name, magnitude_scores(measuring.of.source))


def _llm_pruner(measuring: Measuring, name: str) -> list[Row]:
    """Its order in our widths; and with its own layers left whole, the first and the last ones."""
    blocks, levels = measuring.blocks, measuring.of.levels
    scores = llm_pruner_scores(measuring.of.source, measuring.of.calibration)
    ends = np.zeros(blocks.n_layers)
    ends[[0, -1]] = 1
    own = uniform_widths(blocks, levels, ends, step_of(blocks))
    return measuring.ordered(name, scores) + measuring.ordered(f"{name}, own layers", scores, own)


def _shortgpt(measuring: Measuring, name: str) -> list[Row]:
    """Layers that change their input least are removed first."""
    source, blocks = measuring.of.source, measuring.blocks
    order = layers_to_drop(source, measuring.of.calibration)
    kept = range(blocks.n_layers, 0, -1)
    removed = [without_layers(blocks, order[: blocks.n_layers - n]) for n in kept]
    found = measuring.read(name, Variant(source, blocks, removed))
    return measuring.layers(name, dict(zip(kept, found, strict=True)))


def _laco(measuring: Measuring, name: str) -> list[Row]:
    """Layers are merged into the one before them."""
    from llmaas_eval.elastic.laco import write_merged

    by_kept = {measuring.blocks.n_layers: measuring.full.reading}
    for n in range(1, measuring.blocks.n_layers):
        path = measuring.of.folder / f"{name} {n}.gguf"
        write_merged(measuring.of.source, path, n, measuring.of.calibration)
        (by_kept[n],) = measuring.read(f"{name} {n}", Variant(path))
        path.unlink()
    return measuring.layers(name, by_kept)


METHODS: Mapping[str, Callable[[Measuring, str], list[Row]]] = {
    "random": _random,
    "magnitude": _magnitude,
    "first order": _first_order,
    "LLM-Pruner": _llm_pruner,
    "ShortGPT": _shortgpt,
    "LaCo": _laco,
}
"""By name."""

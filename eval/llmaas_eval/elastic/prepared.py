"""Prepared files, as variants to be read with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llmaas_eval.elastic.engine import Variant
from llmaas_plugins.elastic.metadata import Elastic, read_elastic
from llmaas_plugins.elastic.prepared_file import write_prepared
from llmaas_plugins.elastic.reordering import order_by
from llmaas_plugins.elastic.uniform import LEVELS, anchors_of, step_of, uniform_widths
from llmaas_plugins.elastic.units import Scores, blocks_of

__all__ = ["by_weight", "default_variant", "variants", "write_uniform"]


def write_uniform(source: Path, path: Path, scores: Scores) -> Path:
    """Prepare a model with the paper's widths alone.

    Args:
        source: The model.
        path: Where.
        scores: Of its units, and layers if these differ.
    """
    blocks = blocks_of(source)
    step, losses = step_of(blocks), scores.layers
    losses = np.zeros(blocks.n_layers) if losses is None else losses
    elastic = Elastic(
        blocks=blocks,
        levels=LEVELS,
        step=step,
        tables={"uniform": uniform_widths(blocks, LEVELS, losses, step)},
        anchors=anchors_of(losses),
        calibration=scores.calibration,
        source=None,
        biases={},
    )
    for _ in write_prepared(source, path, elastic, order_by(blocks, scores)):
        pass
    return path


def variants(path: Path, levels: Sequence[float]) -> dict[str, Variant]:
    """By table, with and without compensation, as far as the file has them.

    Args:
        path: A prepared file.
        levels: Which of its levels.

    Raises:
        ValueError: It was not prepared, or not for these levels.
    """
    found = read_elastic(path)
    if found is None or not set(levels) <= set(found.levels):
        raise ValueError(f"{path} was not prepared for the levels {levels}")
    picks = [found.levels.index(level) for level in levels]
    variants = {}
    for name, table in found.tables.items():
        widths = [table[pick] for pick in picks]
        variants[name] = Variant(path, found.blocks, widths)
        if name in found.biases:
            biases = by_weight(found.biases[name][picks])
            variants[f"{name}, compensated"] = Variant(path, found.blocks, widths, biases)
    return variants


def default_variant(path: Path, levels: Sequence[float]) -> Variant:
    """What the plugin takes of a prepared file unless it is told otherwise.

    Raises:
        ValueError: As ``variants``.
    """
    found = variants(path, levels)
    table = "searched" if "searched" in found else "uniform"
    return found.get(f"{table}, compensated", found[table])


def by_weight(biases: NDArray[np.float16]) -> Mapping[str, NDArray[np.float32]]:
    """Biases ``(n_levels, n_layers, 2, n_embd)`` by the weight whose product they are added to."""
    return {
        f"blk.{layer}.{matrix}.weight": biases[:, layer, i].astype(np.float32)
        for layer in range(biases.shape[1])
        for i, matrix in enumerate(("attn_output", "ffn_down"))
    }

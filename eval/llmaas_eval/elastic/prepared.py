"""Prepared files as variants to measure."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llmaas_eval.elastic.engine import Variant
from llmaas_plugins.cli.main import main as llmaas
from llmaas_plugins.elastic.metadata import Elastic, read_elastic
from llmaas_plugins.elastic.prepared_file import write_prepared
from llmaas_plugins.elastic.reordering import order_by
from llmaas_plugins.elastic.uniform import LEVELS, anchors_of, step_of, uniform_widths
from llmaas_plugins.elastic.units import Scores, blocks_of

__all__ = ["by_weight", "default_variant", "prepared", "variants", "write_uniform"]


def write_uniform(
    source: Path, path: Path, scores: Scores, *, cuts_keys_values: bool = False
) -> Path:
    """Write a prepared model that has only the uniform widths, which are the paper's.

    Args:
        source: GGUF file of the model.
        path: Output file.
        scores: Scores of the units. Without scores of layers, all layers count the same.
        cuts_keys_values: Whether levels also leave out keys and values.

    Returns:
        ``path``.
    """
    blocks = blocks_of(source, cuts_keys_values=cuts_keys_values)
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
    """Return a prepared file's variants by table, with and without compensation.

    Args:
        path: A prepared file.
        levels: Levels of the file to include.

    Raises:
        ValueError: The file was not prepared, or not for these levels.
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
    """Return the variant of a prepared file that the plugin uses by default.

    Raises:
        ValueError: The file was not prepared, or not for these levels.
    """
    found = variants(path, levels)
    table = "searched" if "searched" in found else "uniform"
    return found.get(f"{table}, compensated", found[table])


def prepared(model: Path, folder: Path, *, is_quick: bool) -> Path:
    """Return the file that ``llmaas elastic prepare`` writes by default; make it if it is missing.

    Args:
        model: GGUF file of the model.
        folder: Folder for the file.
        is_quick: Whether to leave out the search of widths.

    Raises:
        RuntimeError: The model cannot be prepared.
    """
    folder.mkdir(exist_ok=True)
    path, partial = folder / f"{model.stem}.elastic.gguf", folder / f"{model.stem}.preparing.gguf"
    if not path.exists():
        command = ["elastic", "prepare", str(model), "-o", str(partial)]
        command += ["--scores", str(folder / f"{model.stem}.scores.npz")]
        with contextlib.redirect_stdout(sys.stderr):  # a study's own output is its report
            status = llmaas([*command, *(["--no-search"] if is_quick else [])])
        if status:
            raise RuntimeError(f"{model} cannot be prepared")
        partial.replace(path)  # before the end, it has only the uniform widths
    return path


def by_weight(biases: NDArray[np.float16]) -> Mapping[str, NDArray[np.float32]]:
    """Split biases ``(n_levels, n_layers, 2, n_embd)`` by the weight they belong to.

    A weight's biases, ``(n_levels, n_embd)``, are added to its product.
    """
    return {
        f"blk.{layer}.{matrix}.weight": biases[:, layer, i].astype(np.float32)
        for layer in range(biases.shape[1])
        for i, matrix in enumerate(("attn_output", "ffn_down"))
    }

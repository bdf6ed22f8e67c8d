"""Files of one model without parts of ElastiLM's design: its order, its recovery, its steps."""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from llmaas_plugins.cli.main import main as llmaas
from llmaas_plugins.elastic.metadata import Elastic, order_in, read_elastic
from llmaas_plugins.elastic.prepared_file import write_prepared
from llmaas_plugins.elastic.reordering import Order
from llmaas_plugins.elastic.uniform import uniform_widths
from llmaas_plugins.model.gguf_header import read_header

__all__ = ["in_steps", "recovered", "unordered"]


def unordered(source: Path, prepared: Path, path: Path) -> Path:
    """Return a file with a prepared one's widths and the units in the model's own order.

    Args:
        source: The model before it was prepared.
        prepared: The prepared model.
        path: File to write, if it is missing.
    """
    elastic = _of(prepared)
    blocks = elastic.blocks
    order = Order(_own(blocks.n_layers, blocks.n_groups), _own(blocks.n_layers, blocks.n_ff))
    return _written(source, path, elastic, order)


def in_steps(source: Path, prepared: Path, levels: Sequence[float], path: Path) -> Path:
    """Return a file with a prepared one's order, and with uniform widths for other levels.

    Args:
        source: The model before it was prepared.
        prepared: The prepared model.
        levels: Levels, from wide to narrow.
        path: File to write, if it is missing.
    """
    elastic = _of(prepared)
    losses = np.zeros(elastic.blocks.n_layers)
    losses[list(elastic.anchors)] = 1
    widths = uniform_widths(elastic.blocks, levels, losses, elastic.step)
    changed = replace(elastic, levels=tuple(levels), tables={"uniform": widths})
    by_one = replace(elastic.blocks, group_granule=1, granule=1)
    order = order_in(read_header(prepared), by_one)
    return _written(source, path, changed, order, is_apart=elastic.source is None)


def recovered(path: Path, levels: Sequence[float], n_tokens: int, folder: Path) -> Path:
    """Return a copy with adapters that ``llmaas elastic recover`` learned.

    Args:
        path: A prepared file.
        levels: Levels to recover.
        n_tokens: Tokens to learn from at each level.
        folder: Folder for the copy.

    Raises:
        RuntimeError: The levels cannot be recovered.
    """
    found = folder / f"{path.stem}-recovered-{n_tokens}.gguf"
    if not found.exists():
        partial = folder / f"{path.stem}-recovering.gguf"
        shutil.copyfile(path, partial)
        some = ",".join(f"{level:g}" for level in levels)
        command = ["elastic", "recover", str(partial), "--levels", some, "--tokens", str(n_tokens)]
        with contextlib.redirect_stdout(sys.stderr):  # a study's own output is its report
            status = llmaas(command)
        if status:
            raise RuntimeError(f"the levels of {path} cannot be recovered")
        partial.replace(found)
    return found


# -- inside --------------------------------------------------------------------------------------


def _of(prepared: Path) -> Elastic:
    """Return a prepared file's widths, without what was learned for its order.

    Raises:
        ValueError: The file was not prepared.
    """
    elastic = read_elastic(prepared)
    if elastic is None:
        raise ValueError(f"{prepared} was not prepared")
    return replace(elastic, biases={}, adapters={})


def _own(n_layers: int, n: int) -> np.ndarray[tuple[int, int], np.dtype[np.uint32]]:
    return np.tile(np.arange(n, dtype=np.uint32), (n_layers, 1))


def _written(
    source: Path, path: Path, elastic: Elastic, order: Order, *, is_apart: bool = False
) -> Path:
    """Write a prepared file, if it is missing.

    Args:
        source: The model before it was prepared.
        path: The file.
        elastic: Its metadata.
        order: Order of its units.
        is_apart: Whether neurons move one by one.
    """
    if not path.exists():
        partial = path.with_suffix(".partial")
        for _ in write_prepared(source, partial, elastic, order, takes_blocks_apart=is_apart):
            pass
        partial.replace(path)
    return path

"""Random adapters, for measuring what adapters cost: ours, and llama.cpp's own of the same rank."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

from llmaas_eval.models import finish, open_writer
from llmaas_hooks import LowRank
from llmaas_plugins.elastic.adapters import Adapter, write_adapters
from llmaas_plugins.elastic.metadata import read_elastic
from llmaas_plugins.elastic.parts import COLUMNS, ROWS
from llmaas_plugins.elastic.units import Blocks, Widths

__all__ = ["add_llama_cpps", "random_terms", "write_llama_cpps", "write_random_adapters"]

_SIZE = 0.01


def random_terms(blocks: Blocks, widths: Widths, rank: int) -> dict[str, LowRank]:
    """Return an adapter for each weight at these widths, by weight name."""
    rng = np.random.default_rng(0)
    terms = {}
    for name, (n_rows, n_columns) in _used(blocks, widths):
        a, b = rng.normal(0, _SIZE, (rank, n_columns)), rng.normal(0, _SIZE, (n_rows, rank))
        terms[name] = LowRank.of(a.astype(np.float32), b.astype(np.float32))
    return terms


def write_random_adapters(path: Path, rank: int) -> None:
    """Write adapters of all levels of a prepared file's only table into the file."""
    elastic = read_elastic(path)
    assert elastic is not None
    ((table, levels),) = elastic.tables.items()
    rng = np.random.default_rng(0)

    def adapter(n_rows: int, n_columns: int) -> Adapter:
        a, b = rng.normal(0, _SIZE, (rank, n_columns)), rng.normal(0, _SIZE, (n_rows, rank))
        return Adapter(a.astype(np.float32), b.astype(np.float32))

    weights = {name: adapter(*shape) for name, shape in _used(elastic.blocks, levels[0])}
    adapters = dict.fromkeys(range(1, len(levels)), weights)
    deque(write_adapters(path, table, adapters), maxlen=0)


def write_llama_cpps(path: Path, blocks: Blocks, whole: Widths, rank: int) -> Path:
    """Write an adapter file for llama.cpp, in F16, for the same weights; return its path."""
    writer = open_writer(path, blocks.arch)
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", float(rank))
    rng = np.random.default_rng(0)
    for name, (n_rows, n_columns) in _used(blocks, whole):
        for part, shape in (("lora_a", (rank, n_columns)), ("lora_b", (n_rows, rank))):
            writer.add_tensor(f"{name}.{part}", rng.normal(0, _SIZE, shape).astype(np.float16))
    return finish(writer, path)


def add_llama_cpps(model: Any, ctx: int, path: Path) -> None:
    """Apply an adapter file to a context as llama.cpp does.

    Raises:
        RuntimeError: llama.cpp refused it.
    """
    adapter = llama_cpp.llama_adapter_lora_init(model, str(path).encode())
    adapters = (llama_cpp.llama_adapter_lora_p_ctypes * 1)(adapter)
    if llama_cpp.llama_set_adapters_lora(ctx, adapters, 1, (ctypes.c_float * 1)(1)) != 0:
        raise RuntimeError(f"llama.cpp refused the adapter {path}")


def _used(blocks: Blocks, widths: Widths) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield each adapted weight's name, with its rows and columns in use."""
    names: Sequence[str] = (*ROWS, *COLUMNS)
    for layer in range(blocks.n_layers):
        heads = int(widths.groups[layer]) * blocks.group_width
        neurons = int(widths.neurons[layer])
        for name in names:
            n_units = heads if name.startswith("attn") else neurons
            shape = (n_units, blocks.n_embd) if name in ROWS else (blocks.n_embd, n_units)
            yield f"blk.{layer}.{name}.weight", shape

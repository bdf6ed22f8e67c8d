"""Estimates of what ``llmaas elastic prepare`` takes, from a short probe of this machine."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from llmaas_plugins.cli.models import evaluator_of
from llmaas_plugins.cli.output import progress_bar
from llmaas_plugins.files.file_bytes import as_store_error
from llmaas_plugins.files.temporary_folder import folder_beside

if TYPE_CHECKING:
    from collections.abc import Callable

    from llmaas_plugins.elastic.units import Blocks
    from llmaas_plugins.model.forward import Evaluator

__all__ = ["N_PROBED", "Speeds", "probed", "store_s"]

N_PROBED = 64
"""Tokens that the probe reads at each of two widths."""
_N_READINGS, _N_WRITTEN = 2, 16
_N_BYTES, _N_ROWS = 32 << 20, 256


class Speeds(NamedTuple):
    """Measured times of a model on this machine.

    Attributes:
        read_s: Seconds to read a token with the whole model.
        half_s: Seconds to read a token with half of the units.
        write_s: Seconds to write a token, several sequences at once.
        gradient_s: Seconds to compute gradients of a token's loss, guessed from ``read_s``.
        store_s: Seconds to write a byte of a file.
        requantize_s: Seconds to quantize every ``ffn_down`` again; 0 if none is.
    """

    read_s: float
    half_s: float
    write_s: float
    gradient_s: float
    store_s: float
    requantize_s: float


def probed(model: Path, blocks: Blocks, target: Path, *, is_apart: bool) -> Speeds:
    """Measure a model's speed on a few tokens, and a disk's on up to 32 MiB; this takes seconds.

    Args:
        model: Path of the model.
        blocks: Its blocks.
        target: Path of the prepared file.
        is_apart: Whether ``ffn_down`` is quantized again. The types of other models may have no
            quantizer in Python.
    """
    from llmaas_plugins.elastic.probing import Prober
    from llmaas_plugins.elastic.units import Widths

    prober = Prober(blocks)
    half = Widths(
        -(-prober.full.groups // (2 * blocks.group_granule)) * blocks.group_granule,
        -(-prober.full.neurons // (2 * blocks.granule)) * blocks.granule,
    )
    n_tokens = 2 * _N_READINGS * N_PROBED + _N_WRITTEN
    with (
        evaluator_of(model, prober=prober) as (_, evaluator),
        progress_bar("probing this machine", "token", n_tokens) as bar,
    ):
        read_s = _read_s(evaluator, bar.update)
        prober.set(half)
        half_s = _read_s(evaluator, bar.update)
        prober.set(prober.full)
        write_s = _timed(lambda: list(map(bar.update, evaluator.generate(_N_WRITTEN)))) / _N_WRITTEN
    return Speeds(
        read_s,
        half_s,
        write_s,
        _GRADIENT_READS * read_s,
        store_s(target),
        _requantize_s(model, blocks) if is_apart else 0.0,
    )


_GRADIENT_READS = 6
"""Products of a gradient's forward and backward passes, relative to reading, by float32."""


def _read_s(evaluator: Evaluator, progress: Callable[[int], object]) -> float:
    """Return the seconds to read a token, the fastest of some times."""
    tokens, times = np.arange(N_PROBED, dtype=np.int32) % evaluator.n_vocab, list[float]()
    for _ in range(_N_READINGS):
        times.append(_timed(lambda: list(evaluator.read(tokens))))
        progress(N_PROBED)
    return min(times) / N_PROBED


def store_s(target: Path) -> float:
    """Return the seconds to write a byte to the disk of a file, from up to 32 MiB.

    They take at most half of the space that is free: a file that fits is not refused for its probe.

    Raises:
        StoreError: The disk is full, or the folder cannot be written to.
    """

    def write() -> None:
        with folder_beside(target) as folder, (folder / "probe").open("wb") as file:
            file.write(content)
            os.fsync(file.fileno())

    with as_store_error(f"cannot write {target}", " Make room, or name another place."):
        n_bytes = min(_N_BYTES, max(shutil.disk_usage(target.parent).free // 2, 1))
        content = os.urandom(n_bytes)
        return _timed(write) / n_bytes


def _requantize_s(model: Path, blocks: Blocks) -> float:
    """Return the seconds to quantize all of ``ffn_down`` again, from some rows of one layer."""
    from gguf import quants

    from llmaas_plugins.model.gguf_header import read_header

    tensor = read_header(model).tensors["blk.0.ffn_down.weight"]
    content = np.memmap(
        model, np.uint8, "r", tensor.at, (tensor.n_rows, tensor.n_bytes // tensor.n_rows)
    )
    rows = content[:_N_ROWS]
    seconds = _timed(lambda: quants.quantize(quants.dequantize(rows, tensor.type), tensor.type))
    return seconds * tensor.n_rows / len(rows) * blocks.n_layers


def _timed(do: Callable[[], object]) -> float:
    started = time.perf_counter()
    do()
    return time.perf_counter() - started

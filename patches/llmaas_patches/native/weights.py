"""Memory of weights in files, as plugins see it (implements ``llmaas_hooks.native``)."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from llmaas_hooks import ChannelColumns, ChannelOperand, ConfigError, FileStamp, StoreError
from llmaas_patches.native.library import Library

if TYPE_CHECKING:
    from llmaas_patches.native.backend_context import BackendContext

__all__ = ["Weights"]

_EINVAL, _ESTALE = 1, 7
_BLOCK_COLUMNS = 32
_CACHES = ("streamed", "busiest", "recent")


class Weights:
    """Memory of a model's weights that are read from files."""

    def __init__(self, context: BackendContext, library: Library) -> None:
        """Attach to the model of ``context``."""
        self._context, self._library = context, library

    def set_memory(self, kept: int, arena: int, *, waits: bool = True) -> bool:
        """Change the bytes kept in memory and the bytes of the arena; return whether it was done.

        With ``waits=False``, return False if the change cannot be made at once.
        """
        lib = self._library.lib
        with self._context.alive():
            table = self._context._table
            if not waits:
                return bool(lib.llmaas_weights_try_set_memory(table, kept, arena))
            lib.llmaas_weights_set_memory(table, kept, arena)
            return True

    def keep_level(self, level: int | None) -> None:
        """Keep first the weights that a level uses; None keeps no level first."""
        index = -1 if level is None else level
        with self._context.alive():
            self._library.lib.llmaas_weights_keep_level(self._context._table, index)

    def set_reading(
        self, *, queue_depth: int = 0, read_size: int = 0, read_gap: int | None = None
    ) -> None:
        """Change how files are read."""
        gap = -1 if read_gap is None else read_gap
        reading = self._library.ffi.new("llmaas_reading *", (queue_depth, read_size, gap))
        with self._context.alive():
            table = self._context._table
            status = self._library.lib.llmaas_weights_set_reading(table, reading)
        if status == _EINVAL:
            raise ValueError(
                f"{queue_depth} reads of {read_size} bytes are not possible: expected 1 to 256 "
                "reads, and a multiple of 4096 bytes up to 16 MiB"
            )
        if status != 0:
            raise OSError(f"not enough memory for {queue_depth} reads of {read_size} bytes")

    def stats(self) -> dict[str, int]:
        """Return sizes of the memory, and counters of reads and cache hits."""
        stats = self._library.ffi.new("llmaas_stream_stats *")
        with self._context.alive():
            self._library.lib.llmaas_weights_read_stats(self._context._table, stats)
        return {
            "bytes": stats.n_bytes,
            "kept_bytes": stats.n_kept,
            "arena_bytes": stats.n_arena,
            "least_bytes": stats.n_least,
            "expert_hits": stats.n_hits,
            "expert_misses": stats.n_misses,
            "read_bytes": stats.n_read,
            "wasted_bytes": stats.n_wasted,
            "stalled_ns": stats.stalled_ns,
            "passing_bytes": stats.n_passing,
            "room_bytes": stats.n_room,
            "level_bytes": stats.n_first,
            "level_kept_bytes": stats.n_first_kept,
            "operands": stats.n_operands,
            "channel_hits": stats.n_channel_hits,
            "channel_misses": stats.n_channel_misses,
            "channel_preloads": stats.n_channel_preloads,
            "passes": stats.n_passes,
            "prompt_bytes": stats.n_spare,
            "prompt_kept_bytes": stats.n_spare_kept,
            "prompt_used_bytes": stats.n_spare_used,
        }

    def add_operand(self, path: str, stamp: FileStamp, operand: ChannelOperand) -> None:
        """Compute products of a one-token activation from channels in a file."""
        ffi, lib = self._library
        order = np.ascontiguousarray(operand.order, dtype=np.uint32)
        spec, number = ffi.new("llmaas_operand_spec *"), ffi.new("uint32_t *")
        spec.pool, spec.n_channels, spec.n_bytes = operand.pool, len(order), operand.n_bytes
        spec.offset, spec.stride = operand.offset, operand.stride
        spec.cache = _CACHES.index(operand.cache)
        spec.threshold, spec.n_top = operand.threshold, operand.n_top
        spec.order = ffi.from_buffer("uint32_t[]", order)
        spec.predictor = -1 if operand.predictor is None else operand.predictor
        with self._context.alive():
            table = self._context._table
            checked = ffi.new("llmaas_file_stamp *", tuple(stamp))
            status = lib.llmaas_weights_add_operand(table, os.fsencode(path), checked, spec, number)
            _check_added(status, path, "its layout is inconsistent")
            for columns in operand.columns:
                status = self._add_columns(number[0], len(order) // _BLOCK_COLUMNS, columns)
                _check_added(status, path, f"{columns.weight} has another shape")

    def _add_columns(self, operand: int, n_blocks: int, columns: ChannelColumns) -> int:
        """Add columns, after checking array shapes that the engine trusts; return its status."""
        scales, mins = columns.scales, columns.mins
        shape = n_blocks, scales.shape[-1]
        if scales.shape != shape or (mins is not None and mins.shape != shape):
            return _EINVAL
        ffi, lib = self._library
        status: int = lib.llmaas_weights_add_columns(
            self._context._table,
            columns.weight.encode(),
            operand,
            columns.n_bits,
            columns.offset,
            shape[1],
            _halves(ffi, scales),
            ffi.NULL if mins is None else _halves(ffi, mins),
        )
        return status


def _halves(ffi: Any, values: NDArray[np.float16]) -> Any:
    content = np.ascontiguousarray(values, dtype=np.float16)
    return ffi.from_buffer("uint16_t[]", content.view(np.uint16))


def _check_added(status: int, path: str, problem: str) -> None:
    if status == _EINVAL:
        raise ConfigError(f"{path} does not match this model: {problem}.")
    if status == _ESTALE:
        raise StoreError(
            f"{path} was replaced or changed while it was opened; load the model again"
        )
    if status != 0:
        raise OSError(f"the channels in {path} cannot be used (status {status})")

"""Weights inside the engine: claims on them, and their memory if they are read from files."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from llmaas_hooks.native.low_rank import LowRank
from llmaas_hooks.types import FileStamp

__all__ = ["ChannelColumns", "ChannelOperand", "FileWeights", "TensorInfo", "WeightClaim"]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor in a model's files.

    Attributes:
        type: Number of its ``ggml_type``.
        shape: Numbers of columns, rows, and matrices (experts).
        n_bytes: Size in bytes.
        layout: Identifier of the layout that ggml-cpu repacks the tensor to on this processor; 0 if
            ggml-cpu leaves it as it is.
    """

    type: int
    shape: tuple[int, int, int]
    n_bytes: int
    layout: int

    @property
    def is_matrix(self) -> bool:
        """Whether the tensor has more than one row; a vector cannot be claimed."""
        return self.shape[1] > 1


@dataclass(frozen=True, slots=True)
class WeightClaim:
    """A plugin's claim on weights: their source (where the bytes are) or part (how much is used).

    Each weight has at most one source and one part; two plugins may claim one each. A claim has
    ``rows`` or ``columns``, not both. Each of their entries belongs to a level
    (``NativeContext.level``).

    Attributes:
        pattern: Regular expression that whole tensor names must match.
        source: Where the weights' bytes are. ``"tiles"``: in copies that the host makes, cut at the
            columns in use and stored in ggml-cpu's fastest layout. ``"file"``: in the model file,
            or in the file at ``path``. ``FileWeights.set_memory`` says how much stays in memory;
            the rest is read for each batch. None leaves the source to another plugin, or to
            llama.cpp.
        path: With ``"file"``: a GGUF file with tensors of the same names, types and shapes. Their
            bytes are repacked as ggml-cpu does on this processor, if it repacks such tensors.
        stamp: With ``path``: state of the file before the plugin looked at it. If the state differs
            when the host opens the file, the model is loaded without claims.
        rows: Number of leading rows (outputs) in use, by level; None is all. The other outputs are
            zeros; if they are keys or values, so are their cells. The host rounds up to where the
            weight can be cut (8 rows when repacked).
        columns: Number of leading columns (inputs) in use, by level; None is all. The host rounds
            up to whole blocks of the weight's type.
        biases: With ``columns``: vectors to add to products, by level; float32 of shape
            ``(len(columns), rows of the weight)``. A row of zeros costs nothing.
        adapters: With ``rows`` or ``columns``: low-rank terms to add to products, by level; None
            adds nothing. The host copies them and keeps them in memory.
    """

    pattern: str
    source: Literal["tiles", "file"] | None = None
    path: str | None = None
    stamp: FileStamp | None = None
    rows: tuple[int | None, ...] = ()
    columns: tuple[int | None, ...] = ()
    biases: NDArray[np.float32] | None = field(default=None, compare=False)
    adapters: tuple[LowRank | None, ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class ChannelColumns:
    """A matrix whose columns are stored in the channels of an operand.

    Attributes:
        weight: Name of the matrix.
        n_bits: Bits of each number in a column: 4 or 8.
        offset: Offset of the matrix's column in a channel, in bytes.
        scales: Scales of each block of 32 columns in each row: float16 of shape
            ``(n_channels / 32, rows rounded up to 128)``.
        mins: Minimums of these blocks, in the shape of ``scales``. A weight is its number times its
            scale, minus the minimum, as in Q4_K; only 4-bit columns have minimums. None if there
            are none: then the number 8 (4 bits) or 128 (8 bits) stands for 0.
    """

    weight: str
    n_bits: int
    offset: int
    scales: NDArray[np.float16]
    mins: NDArray[np.float16] | None = None


@dataclass(frozen=True, slots=True)
class ChannelOperand:
    """An activation, and the place in a file of the columns that its values are multiplied with.

    A channel holds the columns that one value of the activation needs: one column of each matrix
    that reads the activation.

    Attributes:
        pool: Number of the memory pool; operands of one pool whose channels have equal sizes share
            memory.
        n_bytes: Bytes of a channel: the columns of all its matrices (llmaas/sparse.h).
        offset: Offset of the first channel in the file, in bytes.
        stride: Bytes from the start of one channel to the next; ``n_bytes`` if channels are
            streamed.
        order: Numbers of the channels in the order of the file: uint32 of shape ``(n_channels,)``.
        cache: Channels that stay in memory. ``"streamed"``: some of them; all others are read
            ahead, used or not. ``"busiest"``: the first ones in the file; others are read on
            demand. ``"recent"``: the ones used most often of late; others are read on demand.
        threshold: Smallest magnitude of a value that is used.
        n_top: Number of largest values to use instead of ``threshold``; 0 uses the threshold.
        columns: Matrices that read the activation.
        predictor: Number of the operand whose used channels are read ahead for this one; operands
            are numbered from 0 in the order of ``add_operand``. All operands that one operand
            predicts lie in the same records. None reads no channels ahead.
    """

    pool: int
    n_bytes: int
    offset: int
    stride: int
    order: NDArray[np.uint32]
    cache: Literal["streamed", "busiest", "recent"]
    threshold: float
    n_top: int
    columns: tuple[ChannelColumns, ...]
    predictor: int | None = None


class FileWeights(Protocol):
    """Memory of a model's weights that are claimed with the source ``"file"``."""

    def set_memory(self, kept: int, arena: int, *, waits: bool = True) -> bool:
        """Set how much memory the weights take; memory given up is free when this returns.

        Args:
            kept: Bytes of weights that stay in memory; 0 at first. A larger batch takes its compute
                memory from these bytes and gives it back afterwards.
            arena: Bytes through which the other weights pass: read ahead, used, and overwritten.
                The minimum is two of the pieces in which weights are read, mostly 2 MiB each.
                Predicted channels are read ahead into as much memory again. 0 frees the arena until
                the next batch.
            waits: Whether to wait for the batch that is being evaluated.

        Returns:
            Whether the sizes were changed. With ``waits`` this is always True; without, it is False
            while a batch is being evaluated.
        """

    def keep_level(self, level: int | None) -> None:
        """Keep the weights that a level uses before all other weights, from the next batch on.

        Where columns are claimed, the columns in use are kept without the others. If all of it
        fits, batches at this level then read nothing. The weights stay part of ``set_memory``'s
        bytes. All contexts of the model share the setting.

        Args:
            level: Index of the level; None keeps no level first, as in the beginning.
        """

    def set_reading(
        self, *, queue_depth: int = 0, read_size: int = 0, read_gap: int | None = None
    ) -> None:
        """Set how files are read, from the next batch on.

        Args:
            queue_depth: Highest number of reads under way: 1 to 256; 0 leaves it to the engine.
            read_size: Largest size of a read in bytes: a multiple of 4096 up to 16 MiB; 0 leaves it
                to the engine.
            read_gap: Largest gap in bytes between two channels that one read covers; None leaves it
                to the engine.

        Raises:
            ValueError: ``queue_depth`` or ``read_size`` is out of range.
            OSError: Memory for the reads ran out.
        """

    def stats(self) -> dict[str, int]:
        """Return the sizes of the weights and of their memory, and totals of reads.

        Bytes now:

        - ``bytes``: weights in files that tokens use, or their channels; 0 if there are none.
        - ``kept_bytes``: the part of them in memory.
        - ``least_bytes``: the part of ``kept_bytes`` that experts need in any case.
        - ``room_bytes``: the most that ``kept_bytes`` may become, without experts and channels.
        - ``level_bytes``: memory that ``keep_level`` needs; 0 without a level.
        - ``level_kept_bytes``: the part of ``level_bytes`` that is there.
        - ``prompt_bytes``: weights that only prompts use, because tokens use their channels.
        - ``prompt_kept_bytes``: the part of them in memory.
        - ``arena_bytes``: memory that other weights pass through.
        - ``passing_bytes``: memory that channels pass through.

        Totals so far:

        - ``passes``: graphs that were computed, each of which passes through the weights.
        - ``prompt_used_bytes``: bytes of ``prompt_bytes`` that passes used: all by a prompt, and a
          part by a token at a narrow level, which uses no channels there.
        - ``read_bytes``: bytes read from files.
        - ``wasted_bytes``: the part of ``read_bytes`` that was read ahead in vain.
        - ``stalled_ns``: nanoseconds for which batches waited for reads.
        - ``expert_hits``, ``expert_misses``: used experts that were in memory, and that were read.
        - ``channel_hits``, ``channel_misses``: used channels that were in memory, and that were
          not.
        - ``channel_preloads``: the part of ``channel_misses`` that had been read ahead.

        ``operands`` is the number of operands that have channels.
        """

    def add_operand(self, path: str, stamp: FileStamp, operand: ChannelOperand) -> None:
        """Add an operand, so that single tokens multiply only an activation's largest values.

        While ``sparse_tokens`` is set, batches of one token take columns from the file at ``path``;
        ``operand.cache`` says which columns stay in memory. Longer batches read the matrices as a
        whole. The operand takes effect with the next batch.

        Args:
            path: Path of the file, which is opened once.
            stamp: State of the file when the plugin checked it.
            operand: The operand to add.

        Raises:
            ConfigError: The file's matrices are not the model's.
            StoreError: The file that was opened has another state than ``stamp``.
            OSError: The file cannot be opened, or memory ran out.
        """

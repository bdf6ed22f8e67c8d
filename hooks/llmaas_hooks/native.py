"""Access to the engine: claim weights, choose parts of them, and tap what graphs compute.

C code does the work, on the threads that compute the graph; see docs/explanation/engine.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from llmaas_hooks.types import FileStamp

__all__ = [
    "Activation",
    "AttentionDensity",
    "CellMemory",
    "ChannelColumns",
    "ChannelOperand",
    "FileWeights",
    "HiddenStates",
    "Magnitudes",
    "Moments",
    "NativeContext",
    "States",
    "Subscription",
    "TensorInfo",
    "WeightClaim",
]

States = Literal["ffn_input", "final_norm"]
"""Hidden states that can be captured.

- ``"ffn_input"``: input of a layer's feed-forward block.
- ``"final_norm"``: input of the output matrix.
"""

Activation = Literal["attn_input", "attn_result", "ffn_input", "ffn_middle"]
"""Activations that can be measured, by the matrices that read them.

- ``"attn_input"``: read by the matrices of queries, keys and values.
- ``"attn_result"``: read by the attention's output matrix.
- ``"ffn_input"``: read by the feed-forward block.
- ``"ffn_middle"``: read by ``ffn_down``; a mixture of experts has none.
"""


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
            zeros. The host rounds up to where the weight can be cut (8 rows when repacked).
        columns: Number of leading columns (inputs) in use, by level; None is all. The host rounds
            up to whole blocks of the weight's type.
        biases: With ``columns``: vectors to add to products, by level; float32 of shape
            ``(len(columns), rows of the weight)``. A row of zeros costs nothing.
    """

    pattern: str
    source: Literal["tiles", "file"] | None = None
    path: str | None = None
    stamp: FileStamp | None = None
    rows: tuple[int | None, ...] = ()
    columns: tuple[int | None, ...] = ()
    biases: NDArray[np.float32] | None = field(default=None, compare=False)


class Subscription(Protocol):
    """A tap on a context's graphs; it ends with the context at the latest."""

    def close(self) -> None:
        """End the subscription after the graph that is being computed; idempotent."""

    def __enter__(self) -> Self:
        """Return the subscription itself."""

    def __exit__(self, *_: object) -> None:
        """End the subscription."""


class AttentionDensity(Subscription, Protocol):
    """Information density of KV positions (LLMS §3.2, Eq 1), accumulated while subscribed."""

    def read(self, n: int) -> tuple[NDArray[np.float64], NDArray[np.uint64]]:
        """Return summed attention and score counts for positions 0…n-1, each of shape ``(n,)``.

        Their ratio is the density: the mean over all queries, heads and layers that can see the
        position. A position starts again at 0 when another token is evaluated there.
        """

    def take(self, n: int) -> tuple[NDArray[np.float64], NDArray[np.uint64]]:
        """Return the same as ``read``, then start these positions again at 0."""

    def cells(self, n: int) -> NDArray[np.int32]:
        """Return the cells of positions 0…n-1 for ``place``; shape ``(n_layers, n)``.

        The result stays valid as long as some sequence has these cells.
        """

    def place(self, kept: int, n: int, cells: NDArray[np.int32] | None = None) -> None:
        """Announce that sequence 0 gets cells that no graph fills.

        All positions from ``kept`` on start again at 0.

        Args:
            kept: Number of leading positions that stay as they are.
            n: End of the new positions: kept…n-1 are restored next, in order of position. Some of
                them may be evaluated instead.
            cells: Cells of positions 0…n-1, as ``cells(n)`` returned them, if the new positions
                still lie there and are not restored.
        """

    def reset(self) -> None:
        """Forget all sums and counts, and which cells hold which positions."""


class HiddenStates(Subscription, Protocol):
    """Rows of hidden states, in the order in which they were computed."""

    def take(self) -> NDArray[np.float32]:
        """Remove and return the rows since the last call; shape ``(n, n_embd)``, oldest first."""

    @property
    def n_lost(self) -> int:
        """Number of rows that were overwritten before any ``take``."""


class Magnitudes(Subscription, Protocol):
    """Histogram of an activation's magnitudes, counted while subscribed."""

    def read(self, layer: int) -> tuple[NDArray[np.uint64], NDArray[np.float64]]:
        """Return a layer's value counts by bucket of magnitude, and summed magnitudes by channel.

        The counts have shape ``(16320,)``. The bucket of value x is the float32 bits of ``abs(x)``,
        shifted right by 17. A bucket is at most 1.6 % wide. Values that are not finite are in no
        bucket. The layer must be one that the subscription counts.
        """


class Moments(Subscription, Protocol):
    """Sums of an activation's values and of their squares, accumulated while subscribed."""

    def read(self, layer: int) -> tuple[int, NDArray[np.float64], NDArray[np.float64]]:
        """Return a layer's number of rows, and by channel the sums of values and of squares.

        Channels that a level leaves out of a row count as zeros. A row whose channels are all left
        out is not counted. The layer must be one that the subscription counts.
        """


class CellMemory(Protocol):
    """Memory of a context's KV cells; llama.cpp reserves all of it when it creates the context."""

    @property
    def n(self) -> int:
        """Number of cells; 0 if their place is unknown, because several buffers hold them."""

    @property
    def n_bytes(self) -> int:
        """Number of bytes of all cells."""

    @property
    def touched_bytes(self) -> int:
        """Number of bytes that may occupy memory now: all of them until the first release.

        After a release, bytes count up to the last cell that a graph reached. A restored cell
        therefore counts from the next graph on.
        """

    def release(self) -> bool:
        """Give the memory of all cells back to the system; a cell written to takes memory again.

        No sequence may use any cell: all cells hold zeros afterwards.

        Returns:
            Whether the memory was given back; if not, nothing was changed.
        """

    def land(
        self, blob: NDArray[np.uint8], sequence: int, n_landings: int
    ) -> NDArray[np.uint64] | None:
        """Label cells as those of a sequence blob, and return where the blob's rows belong.

        The method copies no rows: the caller writes them to the returned places before the next
        evaluation.

        Args:
            blob: Bytes as ``llama_state_seq_set_data`` takes them; only the headers are read.
            sequence: Sequence that gets the cells.
            n_landings: Number of K and V tensors in the blob: two for each layer.

        Returns:
            Places of each K and V in the blob's order, shape ``(n_landings, 4)``, with rows
            ``(address, step, n_bytes, n_pieces)``. A tensor's bytes belong in ``n_pieces`` places
            of ``n_bytes`` each; the first is at ``address`` and the others follow ``step`` bytes
            apart. None if the engine refused or the cells are too scattered; some cells may be
            labeled then, so remove the sequence.
        """


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

        - ``bytes``: weights in files, with their channels; 0 if there are none.
        - ``kept_bytes``: the part of them in memory.
        - ``least_bytes``: the part of ``kept_bytes`` that experts need in any case.
        - ``arena_bytes``: memory that other weights pass through.
        - ``passing_bytes``: memory that channels pass through.

        Totals so far:

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


class NativeContext(Protocol):
    """A context whose graphs pass through the hook point in the engine.

    Every call that needs the engine raises ``ReferenceError`` once the context is freed or the
    suite is deactivated.
    """

    @property
    def ctx(self) -> int:
        """Address of the ``llama_context``."""

    @property
    def model(self) -> int:
        """Address of the ``llama_model``."""

    @property
    def has_claims(self) -> bool:
        """Whether the plugins' claims on its model are in force; False if there are none.

        With ``on_error = "log"`` a single claim that cannot be met voids all claims on a model or
        context.
        """

    @property
    def level(self) -> int:
        """Level in use: an index into the extents of every claimed part; 0 at first.

        Below 0, every part is whole. A new value takes effect with the next batch, or with the next
        ``n_ubatch`` tokens of a batch that another thread evaluates. The change itself costs
        nothing.
        """

    @level.setter
    def level(self, level: int) -> None: ...

    def hold_level(self, level: int) -> None:
        """Fix the level from now on, whatever ``level`` is set to later.

        A plugin uses this for a context of its own: levels that apps request must not matter there.
        """

    @property
    def narrow_attention(self) -> bool:
        """Whether attention skips cells that no token of a batch can see; False at first.

        Setting this may change the last bits of logits. A new value takes effect with the next
        batch, and costs nothing where all cells are visible.
        """

    @narrow_attention.setter
    def narrow_attention(self, is_narrow: bool) -> None: ...

    @property
    def sparse_tokens(self) -> bool:
        """Whether batches of one token multiply only the largest values; False at first.

        The setting concerns weights with operands (``FileWeights.add_operand``) and takes effect
        with the next batch. A larger batch is computed exactly, even where llama.cpp splits it and
        one token is left. Cells that ``Llama`` evaluates one by one meanwhile serve only the
        request that made them: they are neither saved nor reused for a later prompt.
        """

    @sparse_tokens.setter
    def sparse_tokens(self, is_sparse: bool) -> None: ...

    def set_part(self, weight: str, extents: Sequence[int | None]) -> None:
        """Replace the extents of a claimed part in all contexts of the model.

        The call waits for the batch being computed; the next one uses the new extents. Biases stay.

        Args:
            weight: Name of the weight.
            extents: Numbers of rows or columns in use by level, in the form that the claim had.

        Raises:
            ValueError: ``extents`` is empty, has more than 64 entries, or has one below 0.
            KeyError: No part of this weight is claimed.
        """

    def density(self, *, row_step: int = 1, layer_step: int = 1) -> AttentionDensity:
        """Subscribe to attention densities.

        Args:
            row_step: Use one of ``row_step`` queries, a different one in each layer and group of
                heads. Batches with fewer tokens than that use one of ``4 * row_step``, which counts
                four times.
            layer_step: Use every ``layer_step``-th layer. Steps of 1 and 1 are exact.
        """

    def hidden_states(
        self, states: States, *, layer: int | None = None, capacity: int = 4096
    ) -> HiddenStates:
        """Subscribe to hidden states.

        Args:
            states: Which hidden states to capture.
            layer: Layer for ``"ffn_input"``; None is the last layer.
            capacity: Number of rows that are kept until they are taken.
        """

    def magnitudes(self, activation: Activation, n_channels: Mapping[int, int]) -> Magnitudes:
        """Subscribe to counts of an activation's magnitudes.

        Args:
            activation: Which activation to count.
            n_channels: Number of values in a row of the activation, by layer; other layers are not
                counted.
        """

    def moments(self, activation: Activation, n_channels: Mapping[int, int]) -> Moments:
        """Subscribe to sums of an activation and its squares; arguments as for ``magnitudes``."""

    def cells(self) -> CellMemory:
        """Return the memory of this context's KV cells."""

    def file_weights(self) -> FileWeights:
        """Return the memory of the model's weights in files; all contexts of a model share it."""

    def untouched_bytes(self) -> int:
        """Return the reserved compute-buffer bytes that no graph has written."""

    def subscribe(self, tap: Any) -> Subscription:
        """Subscribe a plugin's own tap: the address of an ``llmaas_tap`` (llmaas/tap.h)."""

    def stats(self) -> dict[str, int]:
        """Return the engine's counters.

        - ``graphs``: computed graphs.
        - ``passed``: the part of ``graphs`` that was passed on unchanged.
        - ``products``: products that were replaced.
        - ``taps``: nodes that taps were given.
        - ``narrowed``: attention nodes that were narrowed.
        - ``cut``: nodes that were cut to the rows in use of the weights before them.
        """

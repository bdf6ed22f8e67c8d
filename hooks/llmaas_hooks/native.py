"""What plugins can do inside the engine: claim weights, narrow them, and tap what graphs compute.

The work itself is done in C, on the threads that compute the graph; see docs/engine.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, Self

import numpy as np
from numpy.typing import NDArray

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
"""What a layer's feed-forward block reads; what the output matrix reads."""

Activation = Literal["attn_input", "attn_result", "ffn_input", "ffn_middle"]
"""What a layer's matrices read: queries', keys' and values'; attention's output matrix; the
feed-forward block; its ``ffn_down``, which must not be of a mixture of experts."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor in a model's files.

    Attributes:
        type: Its ``ggml_type``, a number.
        shape: Columns, rows, and matrices (experts).
        n_bytes: Its size.
        layout: How ggml-cpu repacks it on this processor: a number that differs where the layout
            does; 0 if it leaves it as it is.
    """

    type: int
    shape: tuple[int, int, int]
    n_bytes: int
    layout: int

    @property
    def is_matrix(self) -> bool:
        """Whether it has more than one row; what is not is a vector, and never claimed."""
        return self.shape[1] > 1


@dataclass(frozen=True, slots=True)
class WeightClaim:
    """Weights that a plugin takes charge of. Each weight has one source and one part.

    Attributes:
        pattern: Regular expression that whole tensor names must match.
        source: Where their bytes are: ``"tiles"``, in copies of the plugin host's own, cut at the
            columns in use and in ggml-cpu's fastest layout; ``"file"``, in the model file, and in
            memory as far as ``FileWeights.set_memory`` allows: the rest is read for each batch.
            With ``path``, another file has them.
            None leaves that to another plugin, or to llama.cpp.
        path: For ``"file"``: a GGUF file with a tensor of the same name, type and shape whose bytes
            are repacked as ggml-cpu does on this processor, if it does.
        rows: The part in use, by level: how many leading rows (outputs); None is all. What is left
            out gives zeros. Rounded up to where the weight can be cut (8 rows when repacked).
        columns: Likewise columns (inputs), rounded up to whole blocks of the weight's type.
        biases: With ``columns``: what is added to products, float32 of shape
            ``(len(columns), rows of the weight)``; a row of zeros costs nothing.
    """

    pattern: str
    source: Literal["tiles", "file"] | None = None
    path: str | None = None
    rows: tuple[int | None, ...] = ()
    columns: tuple[int | None, ...] = ()
    biases: NDArray[np.float32] | None = field(default=None, compare=False)


class Subscription(Protocol):
    """A tap on a context's graphs. It ends with the context at the latest."""

    def close(self) -> None:
        """End it, after the graph that is being computed; idempotent."""

    def __enter__(self) -> Self:
        """Use as a context manager."""

    def __exit__(self, *_: object) -> None:
        """End it."""


class AttentionDensity(Subscription, Protocol):
    """Information density of the KV positions (LLMS §3.2, Eq 1), accumulated while it is open."""

    def read(self, n: int) -> tuple[NDArray[np.float64], NDArray[np.uint64]]:
        """Of positions 0…n-1: sums of attention, and how many scores each sums; ``(n,)`` each.

        The density is their ratio: the mean over the queries, heads and layers that can see the
        position. A position counts from 0 again when another token is evaluated there.
        """

    def take(self, n: int) -> tuple[NDArray[np.float64], NDArray[np.uint64]]:
        """Likewise, and those positions count from 0 again."""

    def cells(self, n: int) -> NDArray[np.int32]:
        """Where positions 0…n-1 lie, for ``place``; ``(n_layers, n)``.

        That holds as long as some sequence has their cells.
        """

    def place(self, kept: int, n: int, cells: NDArray[np.int32] | None = None) -> None:
        """Say that sequence 0 gets cells which no graph fills; positions beyond ``kept`` restart.

        Args:
            kept: Positions that stay as they are.
            n: Positions kept…n-1 are restored next, in order of position; some of them may be
                evaluated instead.
            cells: They are not restored but lie there still, as ``cells(n)`` told.
        """

    def reset(self) -> None:
        """Count everything from 0."""


class HiddenStates(Subscription, Protocol):
    """Rows of hidden states, in the order they were computed."""

    def take(self) -> NDArray[np.float32]:
        """Take out what came since the last call; shape ``(n, n_embd)``, oldest first."""

    @property
    def n_lost(self) -> int:
        """Rows that were overwritten before anybody took them."""


class Magnitudes(Subscription, Protocol):
    """How large an activation's values are, counted while it is open."""

    def read(self, layer: int) -> tuple[NDArray[np.uint64], NDArray[np.float64]]:
        """Of a layer that is counted: values by magnitude, and the sum of magnitudes by channel.

        Value x counts for the bucket whose number is ``abs(x)``'s bits as float32, shifted right by
        17: each is 1.6 % wide or less. What is not finite is in no bucket.
        """


class Moments(Subscription, Protocol):
    """Sums of an activation's values and of their squares, added up while it is open."""

    def read(self, layer: int) -> tuple[int, NDArray[np.float64], NDArray[np.float64]]:
        """Of a layer that is counted: rows, and by channel sums of values and of squares.

        Channels that a level left out of a row count as zeros there. A row of which it left out
        all does not come.
        """


class CellMemory(Protocol):
    """Memory of a context's KV cells, which llama.cpp takes whole when the context is made."""

    @property
    def n(self) -> int:
        """Cells; 0 if nobody knows where they are: more than one buffer holds them."""

    @property
    def n_bytes(self) -> int:
        """Bytes of all cells."""

    @property
    def touched_bytes(self) -> int:
        """Of them, those that may hold memory now: all, until they are released.

        Counted up to the last cell that a graph reached, so restored ones count from then on.
        """

    def release(self) -> bool:
        """Give the memory of all cells back; each costs some again once something is written there.

        No cell may be in use, in any sequence: what they held is zeros then.

        Returns:
            Whether that was possible; if not, nothing was changed.
        """

    def land(
        self, blob: NDArray[np.uint8], sequence: int, n_landings: int
    ) -> NDArray[np.uint64] | None:
        """Load a sequence blob, but for the bytes of its cells: where these belong is told.

        Args:
            blob: What ``llama_state_seq_set_data`` takes; only its headers are read.
            sequence: Whose cells they become.
            n_landings: Layers' K and V, each of which the blob has; in its order.

        Returns:
            Shape ``(n_landings, 4)``: the address of the first byte, and of how many bytes each
            there are how many places, how far apart: ``(address, step, n_bytes, n_pieces)``. Write
            there before anything is evaluated. None if the engine refused, or cells are too
            scattered: some may be labelled, so remove the sequence.
        """


@dataclass(frozen=True, slots=True)
class ChannelColumns:
    """A matrix whose columns are in the channels of an operand.

    Attributes:
        weight: Its name.
        n_bits: 4 or 8, of a number in a column.
        offset: Of its column in a channel, in bytes.
        scales: float16, of shape ``(n_channels / 32, rows rounded up to 128)``.
        mins: Likewise: what is subtracted from a number times its scale, as in Q4_K; only with
            4 bits. None: nothing is, and 8 or 128 stands for 0.
    """

    weight: str
    n_bits: int
    offset: int
    scales: NDArray[np.float16]
    mins: NDArray[np.float16] | None = None


@dataclass(frozen=True, slots=True)
class ChannelOperand:
    """An activation, and where a file has the columns that its values are multiplied with.

    Attributes:
        pool: Operands of one pool, and with channels of one size, share memory.
        n_bytes: Of a channel: the columns of all its matrices (llmaas/sparse.h).
        offset: In the file, of the first channel.
        stride: From one to the next; ``n_bytes`` if they are streamed.
        order: Which channel is where: uint32, ``(n_channels,)``.
        cache: Which channels stay in memory: with ``"streamed"`` some, and all others are read
            ahead; with ``"busiest"`` the first ones there and with ``"recent"`` those used most
            often of late, and others are read when they turn out to be used.
        threshold: Values are used from this size on.
        n_top: If not 0, as many are used instead: the largest.
        columns: The matrices.
        predictor: Number of an operand, counted from 0 in the order in which they were added.
            Channels that it uses are read ahead for this one: several that it predicts lie in the
            same records. None: none are.
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
    """The memory of a model's weights that are claimed with the source ``"file"``."""

    def set_memory(self, kept: int, arena: int, *, waits: bool = True) -> bool:
        """Change it; what it takes less is free when this returns.

        Args:
            kept: Bytes of weights that stay in memory; 0 at first. What larger batches compute in
                is taken from it, and given back after them.
            arena: Bytes that the others pass through: read ahead, used, and overwritten. At least
                two of the pieces they are read in, which are mostly 2 MiB. Channels that are
                predicted are read ahead to as much again. 0: none until the next batch.
            waits: Whether to wait for the batch that is being evaluated.

        Returns:
            Whether it was changed: always if it waits, else unless a batch is being evaluated.
        """

    def set_reading(
        self, *, queue_depth: int = 0, read_size: int = 0, read_gap: int | None = None
    ) -> None:
        """Change how files are read, from the next batch on.

        Args:
            queue_depth: Reads under way at most: 1 to 256; 0 leaves that to the engine.
            read_size: Bytes of a read at most: a multiple of 4096 up to 16 MiB; 0 likewise.
            read_gap: Bytes between two channels that are read along rather than left out; None
                likewise.

        Raises:
            ValueError: Depth or size is out of range.
            OSError: There is no memory.
        """

    def stats(self) -> dict[str, int]:
        """``bytes`` of the weights (0: none is in a file), memory that they have, what was read.

        ``kept_bytes``, of them ``least_bytes`` for experts in any case, and ``arena_bytes`` are
        now; ``read_bytes``, of them ``wasted_bytes`` ahead in vain, ``stalled_ns``, for which
        batches waited, ``expert_hits`` and ``expert_misses`` are so far. With channels, ``bytes``
        and ``kept_bytes`` count them; ``operands`` says how many have some, ``passing_bytes`` is
        memory that they pass through, and ``channel_hits``, ``channel_misses`` and, of those,
        ``channel_preloads`` that were read ahead are so far.
        """

    def add_operand(self, path: str, operand: ChannelOperand) -> None:
        """Multiply with the largest values of an activation only, with ``sparse_tokens`` on.

        The columns of the matrices that read it come from another file, from the next batch on;
        those used most often of late stay in memory. Longer batches read the matrices as a whole.

        Raises:
            ConfigError: The file's matrices are not the model's.
            OSError: It cannot be opened, or there is no memory.
        """


class NativeContext(Protocol):
    """A context whose graphs pass through the hook point in the engine.

    Once its context is freed, or the suite is deactivated, every method raises ``ReferenceError``.
    """

    @property
    def ctx(self) -> int:
        """Address of the ``llama_context``."""

    @property
    def model(self) -> int:
        """Address of the ``llama_model``."""

    @property
    def has_claims(self) -> bool:
        """Whether what plugins claimed of its model is in force; False, too, if they did not.

        With ``on_error = "log"`` a model or context has none of them if one cannot be met.
        """

    @property
    def level(self) -> int:
        """Which extents of the claimed parts are in use: an index; 0 at first.

        Setting it takes effect with the next batch, or the next ``n_ubatch`` tokens of one that
        another thread evaluates meanwhile, and costs nothing; below 0, every part is all.
        """

    @level.setter
    def level(self, level: int) -> None: ...

    def hold_level(self, level: int) -> None:
        """Use this level from now on, whatever ``level`` is set to: the context is a plugin's own.

        Where a plugin evaluates for itself, what apps ask for at that moment must not matter.
        """

    @property
    def narrow_attention(self) -> bool:
        """Whether attention leaves out cells that no token of a batch can see; False at first.

        Logits may differ in their last bits then. Setting it takes effect with the next batch, and
        costs nothing where all cells are seen.
        """

    @narrow_attention.setter
    def narrow_attention(self, is_narrow: bool) -> None: ...

    @property
    def sparse_tokens(self) -> bool:
        """Whether batches of one token use the largest values only; False at first.

        That concerns weights with operands (``FileWeights.add_operand``). Setting it takes effect
        with the next batch. Cells that ``Llama`` evaluates meanwhile serve the request that made
        them, but no later prompt, and are not saved.
        """

    @sparse_tokens.setter
    def sparse_tokens(self, is_sparse: bool) -> None: ...

    def set_part(self, weight: str, extents: Sequence[int | None]) -> None:
        """Exchange the extents of a claimed part, in all contexts of the model.

        That holds from the next batch on; waits for the one being computed. Biases stay.

        Args:
            weight: Its name.
            extents: Rows or columns by level, as they were claimed.

        Raises:
            ValueError: None or more than 64 of them, or one below 0.
            KeyError: No part of such a weight is claimed.
        """

    def density(self, *, row_step: int = 1, layer_step: int = 1) -> AttentionDensity:
        """Accumulate attention densities.

        Args:
            row_step: Look at one of ``row_step`` queries only, others in each layer and group of
                heads; in smaller batches at one of ``4 * row_step``, which counts four times.
            layer_step: Look at every ``layer_step``-th layer only. 1 and 1 is exact.
        """

    def hidden_states(
        self, states: States, *, layer: int | None = None, capacity: int = 4096
    ) -> HiddenStates:
        """Capture hidden states.

        Args:
            states: Which ones.
            layer: Whose ``"ffn_input"``; the last layer's when None.
            capacity: Rows that are kept until they are taken.
        """

    def magnitudes(self, activation: Activation, n_channels: Mapping[int, int]) -> Magnitudes:
        """Count how large activations are.

        Args:
            activation: Which one.
            n_channels: Its values in each layer that is to be counted, by the layer's number.
        """

    def moments(self, activation: Activation, n_channels: Mapping[int, int]) -> Moments:
        """Add up activations and their squares; arguments as for ``magnitudes``."""

    def cells(self) -> CellMemory:
        """Memory of its KV cells."""

    def file_weights(self) -> FileWeights:
        """Memory of its model's weights that are in files; all contexts of a model share it."""

    def untouched_bytes(self) -> int:
        """Memory for what graphs compute that was reserved, but not written to yet."""

    def subscribe(self, tap: Any) -> Subscription:
        """Subscribe a tap of the plugin's own: the address of an ``llmaas_tap`` (llmaas/tap.h)."""

    def stats(self) -> dict[str, int]:
        """Counters: ``graphs`` computed, of them ``passed`` on as they were, and what was changed.

        ``products`` exchanged, nodes that ``taps`` had, attention of a layer ``narrowed``, and
        nodes ``cut`` to the rows in use of weights before them.
        """

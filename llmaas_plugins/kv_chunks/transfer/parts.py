"""Components of a transfer."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from llmaas_hooks import CellMemory
from llmaas_plugins._native import Codec
from llmaas_plugins.kv_chunks.compression.attention import ChunkAttention
from llmaas_plugins.kv_chunks.compression.bit_allocator import BitAllocator
from llmaas_plugins.kv_chunks.parking.cell_budget import ParkedCellBudget
from llmaas_plugins.kv_chunks.parking.parked_contexts import ParkedContexts
from llmaas_plugins.kv_chunks.parking.unused_cells import UnusedCells
from llmaas_plugins.kv_chunks.store.chunk_store import ChunkStore
from llmaas_plugins.kv_chunks.transfer.pipeline import Workers
from llmaas_plugins.kv_chunks.transfer.staging import Staging

__all__ = ["TransferParts"]


class TransferParts(NamedTuple):
    """Components of a transfer.

    Attributes:
        store: Store of the chunks.
        codec: Encoding of new chunks.
        bit_allocator: Choice of their bits; None if the codec has no levels.
        attention: Attention that the chunks receive; None if it is not measured.
        parking: Contexts that stay in the engine; None if none can.
        spare: Cells in which they stay; None if there are none.
        is_exact: Whether requests give the bits that they would give without the others.
        memory: Memory of the engine's cells; None if it cannot be written directly.
        recomputes: Whether chunks that are slow to read may be recomputed instead.
        staging: Transfer buffers.
        workers: Threads.
        saved: Function that is called after each swap-out, with the seconds that it took.
    """

    store: ChunkStore
    codec: Codec
    bit_allocator: BitAllocator | None
    attention: ChunkAttention | None
    parking: ParkedContexts | None
    spare: ParkedCellBudget | UnusedCells | None
    is_exact: bool
    memory: CellMemory | None
    recomputes: bool
    staging: Staging
    workers: Workers
    saved: Callable[[float], None]

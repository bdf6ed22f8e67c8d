"""Settings of the kv_chunks plugin."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ByteSize, ConfigDict, Field, field_validator

from llmaas_plugins import process_memory
from llmaas_plugins.kv_chunks.compression.tolerance import INT8_BITS
from llmaas_plugins.kv_chunks.store.eviction import EvictionPolicy
from llmaas_plugins.sizes import DiskSize, OptionalMemorySize, OptionalSize

__all__ = ["KVChunksConfig"]

_RAM_BYTES = 256 << 20


class KVChunksConfig(BaseModel):
    """Table ``[plugins.kv_chunks]`` of ``llmaas.toml``."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    codec: Literal["tolerance", "int8", "lossless"] = Field(
        default="tolerance",
        description="How chunks are encoded outside the engine: with as many bits as each chunk "
        "needs (LLMS §3.2), in 8-bit groups, or losslessly.",
    )
    levels: tuple[Annotated[int, Field(ge=1, le=INT8_BITS)], ...] = Field(
        default=(8, 6, 5, 4, 3, 2),
        min_length=1,
        description='Bits per value to choose from with "tolerance".',
    )
    ratio_global: float = Field(
        default=0.5,
        gt=0,
        le=1,
        description='Mean bits per value of a context with "tolerance", as a share of 8.',
    )
    ram_budget: OptionalMemorySize = Field(
        default=None,
        description="Bytes for all contexts but the running one: encoded chunks in RAM, transfer "
        "buffers and parked cells. If unset, 256 MiB, or what `memory.budget` leaves to them. A "
        "`memory_budget` of flash_weights may leave less, too.",
    )
    parked_tokens: int | None = Field(
        default=None,
        ge=0,
        le=1 << 24,
        description="Most tokens of inactive contexts that stay in the engine's cells, in steps of "
        "256. Switching to such a context is fastest, but it takes the most memory. Attention is "
        "then added up in another order, which may move logits a little with any codec. If unset, "
        "none; with `memory.budget`, three contexts of the engine's size, if they fit and the "
        "codec is not lossless.",
    )
    store: Path = Field(
        default=Path("~/.cache/llmaas/kv"),
        description="Directory of the disk tier. Only one process at a time can use it.",
    )
    disk_budget: DiskSize = Field(
        default=ByteSize(4 << 30),
        description="Bytes for the slab file; 0 stores nothing on disk. The files of earlier "
        "runs stay in `store`.",
    )
    write_budget: OptionalSize = Field(
        default=None,
        description="Bytes that may be written to the slab each day; no limit when unset.",
    )
    eviction: EvictionPolicy = Field(
        default="lru",
        description='Which chunks leave RAM first: the least recently used ("lru"), or those with '
        'the most bits, and among them the least recently used ("lctru", LLMS §3.4).',
    )
    swap_out: Literal["ahead", "on_demand"] = Field(
        default="ahead",
        description="When to write chunks to disk and read others back into free RAM: after each "
        'reply ("ahead"), or only when needed ("on_demand").',
    )
    recompute: bool = Field(
        default=True,
        description="Whether a load recomputes tokens where that is faster than reading their "
        "chunks (LLMS §3.3). Recomputing splits batches differently, so last bits can differ.",
    )
    share_across_apps: bool = Field(
        default=False,
        description="Whether apps share cells and chunks of equal prefixes. Response times then "
        "reveal to one app what others asked. Contexts of the same app always share.",
    )

    @property
    def ram_bytes(self) -> int:
        """Bytes of RAM that contexts may take at most."""
        return int(self.ram_budget or process_memory.budget() or _RAM_BYTES)

    @field_validator("levels", mode="before")
    @classmethod
    def _listed(cls, levels: object) -> object:
        return levels.split(",") if isinstance(levels, str) else levels  # from the environment

    @field_validator("levels")
    @classmethod
    def _falling(cls, levels: tuple[int, ...]) -> tuple[int, ...]:
        if list(levels) != sorted(set(levels), reverse=True):
            raise ValueError(f"must be in descending order, as in [8, 4, 2]; found {list(levels)}")
        return levels

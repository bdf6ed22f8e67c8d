"""Settings of the plugin."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ByteSize, ConfigDict, Field, field_validator

from llmaas_plugins.kv_chunks.queues import Eviction
from llmaas_plugins.kv_chunks.tolerance import INT8_BITS
from llmaas_plugins.sizes import DiskSize, MemorySize, OptionalSize

__all__ = ["KVChunksConfig"]


class KVChunksConfig(BaseModel):
    """Table ``[plugins.kv_chunks]`` of ``llmaas.toml``."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    codec: Literal["tolerance", "int8", "lossless"] = Field(
        default="tolerance",
        description="How chunks are kept outside the engine: with as many bits as each needs "
        "(LLMS §3.2), as 8-bit groups, or every bit as it was.",
    )
    levels: tuple[Annotated[int, Field(ge=1, le=INT8_BITS)], ...] = Field(
        default=(8, 6, 5, 4, 3, 2),
        min_length=1,
        description='Bits a value may have with "tolerance".',
    )
    ratio_global: float = Field(
        default=0.5,
        gt=0,
        le=1,
        description='Mean bits of a context\'s values with "tolerance", as a share of 8.',
    )
    ram_budget: MemorySize = Field(
        default=ByteSize(256 << 20),
        ge=1 << 20,
        description="Bytes for contexts outside the running one: encoded chunks in RAM, transfer "
        "buffers and parked cells.",
    )
    parked_tokens: int = Field(
        default=0,
        ge=0,
        description="Most tokens of left contexts that stay in the engine's cells, in steps of "
        "256: switching to them is fastest, and they take the most memory.",
    )
    store: Path = Field(
        default=Path("~/.cache/llmaas/kv"),
        description="Directory of the disk tier. One process at a time.",
    )
    disk_budget: DiskSize = Field(
        default=ByteSize(4 << 30), description="Bytes for the slab file; 0 keeps nothing on disk."
    )
    write_budget: OptionalSize = Field(
        default=None, description="Bytes that may be written to the slab a day; any when unset."
    )
    eviction: Eviction = Field(
        default="lru",
        description="Which chunks leave RAM first: the least recently used; or those with most "
        "bits, and among them the least recently used (LLMS §3.4).",
    )
    swap_out: Literal["ahead", "on_demand"] = Field(
        default="ahead",
        description="Write chunks to disk, and read others back into free RAM, behind each reply; "
        "or only when there is need.",
    )
    recompute: bool = Field(
        default=True,
        description="Whether a load evaluates tokens again where that is faster than reading their "
        "chunks (LLMS §3.3); what it evaluates has other batch splits, so other last bits.",
    )
    share_across_apps: bool = Field(
        default=False,
        description="Whether apps share cells and chunks of equal prefixes; then they can tell by "
        "the time what others asked. An app's own contexts always share.",
    )

    @field_validator("levels", mode="before")
    @classmethod
    def _listed(cls, levels: object) -> object:
        return levels.split(",") if isinstance(levels, str) else levels  # from the environment

    @field_validator("levels")
    @classmethod
    def _falling(cls, levels: tuple[int, ...]) -> tuple[int, ...]:
        if list(levels) != sorted(set(levels), reverse=True):
            raise ValueError(f"must fall, as in [8, 4, 2]; found {list(levels)}")
        return levels

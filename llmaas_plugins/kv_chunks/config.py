"""Settings of the plugin."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ByteSize, ConfigDict, Field

__all__ = ["KVChunksConfig"]


class KVChunksConfig(BaseModel):
    """Table ``[plugins.kv_chunks]`` of ``llmaas.toml``."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    codec: Literal["int8", "lossless"] = Field(
        default="int8",
        description="How chunks are kept outside the engine: 8-bit groups, or every bit as it was.",
    )
    ram_budget: ByteSize = Field(
        default=ByteSize(256 << 20),
        ge=1 << 20,
        description="Bytes for encoded chunks in RAM, transfer buffers included.",
    )
    disk_budget: ByteSize = Field(
        default=ByteSize(4 << 30), description="Bytes for the slab file; 0 keeps nothing on disk."
    )
    store: Path = Field(
        default=Path("~/.cache/llmaas/kv"),
        description="Directory of the disk tier. One process at a time.",
    )

"""Settings of the plugin."""

from __future__ import annotations

from pydantic import BaseModel, ByteSize, ConfigDict, Field

__all__ = ["FlashWeightsConfig"]


class FlashWeightsConfig(BaseModel):
    """Table ``[plugins.flash_weights]`` of ``llmaas.toml``."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    memory_budget: ByteSize | None = Field(
        default=None,
        description="Memory of the whole process. Weights that do not fit are streamed from the "
        "model file. When unset, nine tenths of what the system, or the process's cgroup, has left "
        "for it, followed as that changes.",
    )
    arena: ByteSize = Field(
        default=ByteSize(32 << 20),
        ge=1 << 20,
        description="Memory that streamed weights pass through. A part of the budget.",
    )

"""Settings of the plugin."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ByteSize, ConfigDict, Field, model_validator

from llmaas_plugins.sizes import OptionalMemorySize, OptionalSize, Size

__all__ = ["FlashWeightsConfig"]


class FlashWeightsConfig(BaseModel):
    """Table ``[plugins.flash_weights]`` of ``llmaas.toml``."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    mode: Literal["exact", "sparse"] = Field(
        default="exact",
        description="`exact` computes with every weight. `sparse` multiplies tokens with the "
        "largest values of each activation only, and reads what those need: faster, and no longer "
        "the same text. Prompts stay exact, and drafts are declined. It needs "
        "`llmaas flash pack --sparse`.",
    )
    sparsity: float = Field(
        default=0.5,
        ge=0,
        le=0.95,
        description="Share of an activation's values that tokens leave out in the sparse mode.",
    )
    selection: Literal["threshold", "top_k"] = Field(
        default="threshold",
        description="Which values a token uses: those from a size on that was calibrated once, or "
        "exactly as many as `sparsity` says.",
    )
    cache: Literal["streamed", "busiest", "shared", "layer"] = Field(
        default="streamed",
        description="Which columns stay in memory when not all fit. `streamed`: some, and all "
        "others are read ahead for each token. Or only those are read that a token turns out to "
        "need, and what stays are the `busiest` of the calibration, or those used most often of "
        "late, for which all layers compete (`shared`) or of which each layer has as many as the "
        "others (`layer`, ActiveFlow's way).",
    )
    preload: bool = Field(
        default=False,
        description="With a cache other than `streamed`: read ahead the columns that the group of "
        "layers after this one will need, if they are those that this one does (ActiveFlow).",
    )
    memory_budget: OptionalMemorySize = Field(
        default=None,
        description="Memory of the whole process: a size, or a share of what the machine, or the "
        "process's cgroup, has. Weights that do not fit are streamed from the "
        "model file. When unset, nine tenths of what the system, or the process's cgroup, has left "
        "for it, followed as that changes.",
    )
    arena: Size = Field(
        default=ByteSize(32 << 20),
        ge=1 << 20,
        description="Memory that streamed weights pass through. A part of the budget.",
    )
    queue_depth: int | None = Field(
        default=None,
        ge=1,
        le=256,
        description="Reads under way at a time. When unset 16, and 64 of columns that are read "
        "when a token turns out to need them.",
    )
    read_size: OptionalSize = Field(
        default=None,
        ge=4096,
        le=16 << 20,
        multiple_of=4096,
        description="Longest read. When unset 1 MiB, and 256 KiB of such columns.",
    )
    read_gap: OptionalSize = Field(
        default=None,
        le=1 << 20,
        description="Longest gap between two such columns that is read along with them rather "
        "than left out. When unset 12 KiB.",
    )

    @model_validator(mode="after")
    def _nothing_is_streamed_twice(self) -> Self:
        if self.preload and self.cache == "streamed":
            raise ValueError(
                "preload is for columns that are read on demand, and with the cache `streamed` all "
                "of them are read ahead; choose another cache"
            )
        return self

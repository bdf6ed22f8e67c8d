"""Settings of the flash_weights plugin."""

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
        description="`exact` computes with every weight. `sparse` decodes with only the largest "
        "values of each activation, and reads only the weights that they need. It is faster, but "
        "changes the text. Prompts stay exact, and drafts are declined. It needs "
        "`llmaas flash pack --sparse`.",
    )
    sparsity: float = Field(
        default=0.5,
        ge=0,
        le=0.95,
        description="Share of all columns' weights that the sparse mode leaves out per token.",
    )
    selection: Literal["threshold", "top_k"] = Field(
        default="threshold",
        description="How a token selects values: all above a calibrated threshold, or exactly as "
        "many as `sparsity` allows.",
    )
    cache: Literal["streamed", "busiest", "shared", "layer"] = Field(
        default="streamed",
        description="Which columns stay in memory when not all fit. `streamed` keeps some and "
        "reads all others ahead for each token. The other caches read only the columns that a "
        "token needs. `busiest` keeps the columns that the calibration found busiest. `shared` "
        "keeps those used most in recent tokens, with all layers competing. `layer` does so with "
        "equally many columns for each layer (ActiveFlow's way).",
    )
    preload: bool = Field(
        default=False,
        description="With a cache other than `streamed`: read ahead columns for the next group of "
        "layers, assuming that it needs the same ones as this group (ActiveFlow).",
    )
    memory_budget: OptionalMemorySize = Field(
        default=None,
        description="Memory of the whole process: a size, or a share of the memory of the machine "
        "or of the process's cgroup. Weights that do not fit are streamed from the model file. If "
        "unset, nine tenths of the memory that the machine or the cgroup has available, adjusted "
        "as that changes.",
    )
    arena: Size = Field(
        default=ByteSize(32 << 20),
        ge=1 << 20,
        description="Buffer that streamed weights pass through. It is part of the budget.",
    )
    queue_depth: int | None = Field(
        default=None,
        ge=1,
        le=256,
        description="Concurrent reads. If unset, 16, or 64 for columns that are read when a token "
        "needs them.",
    )
    read_size: OptionalSize = Field(
        default=None,
        ge=4096,
        le=16 << 20,
        multiple_of=4096,
        description="Longest read. If unset, 1 MiB, or 256 KiB for such columns.",
    )
    read_gap: OptionalSize = Field(
        default=None,
        le=1 << 20,
        description="Longest gap between two such columns that is read with them instead of "
        "skipped. If unset, 12 KiB.",
    )

    @model_validator(mode="after")
    def _nothing_is_streamed_twice(self) -> Self:
        if self.preload and self.cache == "streamed":
            raise ValueError(
                "preload is for columns that are read on demand, but the cache `streamed` reads "
                "all of them ahead; choose another cache"
            )
        return self

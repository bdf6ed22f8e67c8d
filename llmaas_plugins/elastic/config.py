"""Settings of the elastic plugin."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from llmaas_hooks.levels import LEAST_LEVEL

__all__ = ["ElasticConfig"]


class ElasticConfig(BaseModel):
    """Table ``[plugins.elastic]`` of ``llmaas.toml``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    level: float = Field(
        default=1.0,
        ge=LEAST_LEVEL,
        le=1,
        description="Share of the blocks' weights to compute with when neither the request nor "
        "another plugin sets a level: 1.0 is the whole model.",
    )
    prefill_level: float | None = Field(
        default=None,
        ge=LEAST_LEVEL,
        le=1,
        description="Level for prompts, instead of `level`.",
    )
    decode_level: float | None = Field(
        default=None,
        ge=LEAST_LEVEL,
        le=1,
        description="Level from the first token of an answer on, instead of `level`.",
    )
    table: Literal["searched", "uniform"] | None = Field(
        default=None,
        description="How a level divides its weights among the layers. `searched` uses the widths "
        "that were searched for this model. `uniform` uses the same share in every layer except "
        "the anchors (ElastiLM). If unset, the searched widths if the file has them.",
    )
    compensate: bool = Field(
        default=True,
        description="Add the mean output of the units that a level leaves out, if the file has it.",
    )
    adapters: bool = Field(
        default=True,
        description="Add the adapters that were trained for each level, if the file has them.",
    )
    drafts: bool = Field(
        default=True,
        description="Where `flash_weights` streams the model: let a narrow level that memory keeps "
        "draft tokens for the whole model, as long as that is faster. The text stays the same.",
    )

"""Settings of the plugin."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from llmaas_hooks.types import LEAST_LEVEL

__all__ = ["ElasticConfig"]


class ElasticConfig(BaseModel):
    """Table ``[plugins.elastic]`` of ``llmaas.toml``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    level: float = Field(
        default=1.0,
        ge=LEAST_LEVEL,
        le=1,
        description="Share of the blocks' weights that requests compute with when neither they nor "
        "another plugin say: 1.0 is the whole model.",
    )
    prefill_level: float | None = Field(
        default=None,
        ge=LEAST_LEVEL,
        le=1,
        description="Of prompts, instead of `level`.",
    )
    decode_level: float | None = Field(
        default=None,
        ge=LEAST_LEVEL,
        le=1,
        description="From the first token of an answer on, instead of `level`.",
    )
    table: Literal["searched", "uniform"] | None = Field(
        default=None,
        description="Which widths the layers have at a level: those that were searched for this "
        "model, or the same share in all layers but the anchors (ElastiLM). When unset those that "
        "were searched, if the file has them.",
    )
    compensate: bool = Field(
        default=True,
        description="Add what the units that are left out add on average, if the file has it.",
    )

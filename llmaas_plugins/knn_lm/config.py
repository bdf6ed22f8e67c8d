"""Settings of the plugin."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from llmaas_plugins._native import KNN_MAX_BEST

__all__ = ["KnnLMConfig"]


class KnnLMConfig(BaseModel):
    """Table ``[plugins.knn_lm]`` of ``llmaas.toml``."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    store: Path = Field(
        default=Path("~/.cache/llmaas/knn"),
        description="Directory of the datastore: what is kept of past chats, and what is selected "
        "of it. One model and one writing process at a time.",
    )
    key: Literal["ffn_input", "final_norm"] = Field(
        default="ffn_input",
        description="Hidden states that are compared: what the last layer's feed-forward block "
        "reads, or the final norm's output. Of a datastore that is there, its own.",
    )
    size: int = Field(
        default=100_000, ge=1, description="Most pairs that are selected to be searched."
    )
    dims: int = Field(
        default=128,
        ge=1,
        description="Directions in which keys are scanned: the ones in which they differ most; "
        "all, if a key has no more. A byte each a pair in RAM.",
    )
    index: Literal["scan", "faiss"] = Field(
        default="scan",
        description="How pairs are searched: all of them, exactly; or some, by an index of faiss "
        "that is made at the start: for more than a million pairs.",
    )
    k: int = Field(
        default=100, ge=1, le=KNN_MAX_BEST // 16, description="Neighbours that are mixed."
    )
    alpha: float | None = Field(
        default=None, ge=0, le=1, description="Most weight of the neighbours; as fitted when unset."
    )
    beta: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="How much less they weigh when the model is sure; as fitted when unset.",
    )
    skip_above: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="Nothing is searched when the model gives a token this probability; as fitted "
        "when unset, and 1 searches always.",
    )
    look_back: int = Field(
        default=64,
        ge=0,
        le=512,
        description="Prompt tokens by which it is judged whether the datastore knows this kind of "
        "text; 0 always trusts it.",
    )
    mix: bool = Field(default=True, description="Mix the datastore into the next token's logits.")
    drafts: bool = Field(
        default=False,
        description="Propose what followed the same words in past chats, to be verified several "
        "tokens at a time: the same text, sooner.",
    )
    share_across_apps: bool = Field(
        default=False,
        description="Answer every app with every app's stored chats. Otherwise with its own and "
        "those that name no app.",
    )
    learn: bool = Field(
        default=False,
        description="Learn what waits in the store's `inbox` while the device is idle: chat "
        "exports that were put there, and what apps have remembered.",
    )
    idle_s: float = Field(
        default=10.0, gt=0, description="Seconds without a request after which it is idle."
    )

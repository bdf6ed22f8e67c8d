"""Settings of the plugin."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from llmaas_plugins._native import KNN_MAX_BEST, KNN_MAX_DIMS
from llmaas_plugins.sizes import Count, Seconds

__all__ = ["KnnLMConfig"]


class KnnLMConfig(BaseModel):
    """Table ``[plugins.knn_lm]`` of ``llmaas.toml``."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    store: Path = Field(
        default=Path("~/.cache/llmaas/knn"),
        description="Directory of the datastore: the archive of past chats, and the pairs selected "
        "from it. It holds one model's data. Several processes may answer with it; one at a time "
        "may add chats or select pairs.",
    )
    key: Literal["ffn_input", "final_norm"] = Field(
        default="ffn_input",
        description="Hidden states used as keys: the input of the last layer's feed-forward block, "
        "or the output of the final norm. An existing datastore keeps the kind it was built with.",
    )
    size: Count = Field(default=100_000, ge=1, description="Most pairs to select for searching.")
    how: Literal["draw", "top"] = Field(
        default="draw",
        description="How pairs are selected: `draw` takes hard ones more often than others; `top` "
        "takes the hardest ones only, as the paper does.",
    )
    dims: int = Field(
        default=128,
        ge=1,
        le=KNN_MAX_DIMS,
        description="Dimensions in which keys are scanned: the principal components with the most "
        "variance; all of them if a key has no more. One byte a dimension and pair in RAM.",
    )
    index: Literal["scan", "faiss"] = Field(
        default="scan",
        description="How pairs are searched: `scan` compares all of them; `faiss` finds about the "
        "nearest, with an index built at startup, and pays off above a million pairs.",
    )
    k: int = Field(
        default=100, ge=1, le=KNN_MAX_BEST // 16, description="Neighbors that are mixed."
    )
    alpha: float | None = Field(
        default=None, ge=0, le=1, description="Most weight of the neighbors; fitted value if unset."
    )
    beta: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="How much less neighbors weigh when the model is sure; fitted value if unset.",
    )
    skip_above: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="Skip the search when the model's most likely token has at least this "
        "probability; fitted value if unset; 1 always searches.",
    )
    look_back: int = Field(
        default=64,
        ge=0,
        le=512,
        description="Prompt tokens on which the datastore's fit to this kind of text is judged; 0 "
        "always trusts the datastore.",
    )
    mix: bool = Field(
        default=True, description="Mix the datastore's predictions into the next token's logits."
    )
    drafts: bool = Field(
        default=False,
        description="Propose the tokens that followed the same words in past chats, and verify "
        "several at a time: the same text, sooner.",
    )
    share_across_apps: bool = Field(
        default=False,
        description="Let every app's answers use every app's stored chats. Otherwise an app's "
        "answers use its own chats and those that name no app.",
    )
    learn: bool = Field(
        default=False,
        description="Learn the chats that wait in the store's `inbox` while the device is idle: "
        "chat exports that were put there, and chats that apps asked to remember.",
    )
    idle_s: Seconds = Field(
        default=10.0, gt=0, description="Seconds without a request after which the device is idle."
    )

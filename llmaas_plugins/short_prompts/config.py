"""Settings of the plugin."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from llmaas_hooks import ConfigError
from llmaas_plugins.short_prompts.patterns import Pattern

__all__ = ["AppShare", "ScorerName", "ShortPromptsConfig"]

ScorerName = Literal["encoder", "attention", "self_information", "first", "last", "random"]


def _checked(text: str) -> str:
    try:
        Pattern(text)
    except ConfigError as error:
        raise ValueError(str(error)) from None
    return text


_Share = Annotated[float, Field(gt=0, le=1)]


class AppShare(BaseModel):
    """Table ``[plugins.short_prompts.apps.NAME]``: prompts of one app."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    share: _Share | None = Field(
        default=None,
        description="Share of a prompt's tokens that is read, for requests that name none and have "
        "no promise of latency. 1 forbids to shorten the app's prompts.",
    )


class ShortPromptsConfig(AppShare):
    """Table ``[plugins.short_prompts]`` of ``llmaas.toml``."""

    scorer: ScorerName | None = Field(
        default=None,
        description="How words are judged: by a tiny language model (`encoder`), by the attention "
        "or the expectations of the model itself (`attention`, `self_information`), or by their "
        "places. Unset: the encoder if `llmaas prompts learn` has trained one, else `attention`.",
    )
    shares: tuple[_Share, ...] = Field(
        default=(0.7, 0.5, 0.3, 0.2),
        max_length=8,
        description="Shares that promises of latency may choose from; empty: only apps and the "
        "configuration shorten prompts.",
    )
    least_tokens: int = Field(
        default=160,
        ge=2,
        description="Prompts with fewer tokens stay whole: choosing would take longer than reading "
        "them.",
    )
    protect: tuple[Annotated[str, AfterValidator(_checked)], ...] = Field(
        default=(),
        max_length=32,
        description="Regular expressions of text that is never left out, besides the question, "
        "code, numbers and names.",
    )
    apps: Mapping[str, AppShare] = Field(
        default_factory=dict, description="Settings of an app, by the app's name."
    )

    def share_of(self, app: str | None) -> float | None:
        """Return the share that is configured for an app's requests; None if none is."""
        own = None if app is None else self.apps.get(app)
        return self.share if own is None or own.share is None else own.share

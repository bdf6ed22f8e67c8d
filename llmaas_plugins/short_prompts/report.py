"""Reports of shortened prompts: for who made the request, and for the status."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from llmaas_plugins.short_prompts.budget import Shortened

__all__ = ["Counts", "report_of", "text_left_out"]

_MOST_SHOWN = 1200
"""Most bytes of a text that was left out, as JSON: a header of the service carries 4 KiB."""


@dataclass(slots=True)
class Counts:
    """Counts since the plugin was activated.

    Attributes:
        prompts: Prompts that were shortened.
        tokens: Their tokens.
        tokens_read: Tokens of these that were read.
        over_budget: Prompts whose protected words alone were more than the budget.
        seconds: Time that choosing took.
    """

    prompts: int = 0
    tokens: int = 0
    tokens_read: int = 0
    over_budget: int = 0
    seconds: float = 0.0

    def add(self, found: Shortened, seconds: float) -> None:
        """Count a prompt."""
        self.prompts += 1
        self.tokens += len(found.prompt.tokens)
        self.tokens_read += len(found.tokens)
        self.over_budget += found.exceeds
        self.seconds += seconds

    def report(self) -> dict[str, Any]:
        """Return the counts as plain JSON types."""
        return {
            "prompts": self.prompts,
            "tokens": self.tokens,
            "tokens_read": self.tokens_read,
            "over_budget": self.over_budget,
            "seconds": round(self.seconds, 4),
        }


def report_of(found: Shortened, share: float, seconds: float) -> dict[str, Any]:
    """Return how a prompt was shortened, as plain JSON types.

    ``over_budget`` says whether the protected words alone were more than the share, and ``crowded``
    whether there were so many numbers and names that they were judged as other words.
    """
    return {
        "share": share,
        "tokens": len(found.prompt.tokens),
        "tokens_read": len(found.tokens),
        "over_budget": found.exceeds,
        "crowded": found.is_crowded,
        "ms": round(1000 * seconds, 3),
    }


def text_left_out(found: Shortened) -> str:
    """Return the text that was left out, cut to 1,200 bytes of JSON."""
    text = " … ".join(part.strip() for part in found.left_out)
    return _cut(text[:_MOST_SHOWN]) if _is_long(text) else text


def _is_long(text: str) -> bool:
    return len(json.dumps(text[: _MOST_SHOWN + 1])) > _MOST_SHOWN


def _cut(text: str) -> str:
    """Return the beginning of a long text."""
    while _is_long(text):
        text = text[: len(text) * 7 // 8]
    return f"{text}…"

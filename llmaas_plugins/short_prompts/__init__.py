"""Shorter prompts: requests read only the words that their answers need (ElastiLM §3.3).

    from llmaas_plugins import short_prompts

    with short_prompts.share(0.5):
        llm(prompt)

``words`` divides a prompt into words, ``protection`` finds those that must stay, ``scorers`` judge
the others, and ``budget`` keeps the best.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

from llmaas_hooks import Levels, request_scope

__all__ = ["share"]


def share(share: float) -> AbstractContextManager[None]:
    """Read at most this share of the prompts' tokens in requests started inside the block.

    Words that must stay, such as the question, stay even if they alone are more. 1 forbids to
    shorten a prompt. In nested blocks the inner share counts. Without the plugin, the block has no
    effect.

    Args:
        share: Share of the tokens, above 0 and at most 1.

    Raises:
        ConfigError: The share is out of range.
    """
    return request_scope.at_levels(Levels(prompt_share=share))

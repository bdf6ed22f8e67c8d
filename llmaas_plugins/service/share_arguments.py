"""Share of a prompt that a call asks to be read, in an argument, a body's field, or a header."""

from __future__ import annotations

from typing import Any

from llmaas_hooks import ConfigError, Levels
from llmaas_plugins.activation import active_suite

__all__ = ["check_share", "share_in_header", "share_of"]


def share_of(value: object) -> Levels:
    """Return levels with the share of the prompt, or none for None.

    Raises:
        ConfigError: The value is not a number above 0 and at most 1.
    """
    share: Any = value
    return Levels(prompt_share=share)


def share_in_header(text: str) -> Levels:
    """Return levels with the share in a header, such as ``0.5``.

    Raises:
        ConfigError: The header has another form.
    """
    try:
        share = float(text)
    except ValueError:
        raise ConfigError(f"expected a share of the prompt such as 0.5, found {text!r}") from None
    return Levels(prompt_share=share)


def check_share(levels: Levels) -> None:
    """Check that prompts can be shortened if a shorter one is asked for.

    Raises:
        ConfigError: A shorter prompt is asked for, but the plugin that chooses it is not on.
    """
    suite = active_suite()
    is_whole = levels.prompt_share in (None, 1)
    if not is_whole and (suite is None or "short_prompts" not in suite.config.enabled()):
        raise ConfigError("prompts are not shortened: the plugin short_prompts is not on")

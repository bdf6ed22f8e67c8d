"""Levels that a call asks for in an argument, a body's field, or a header."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmaas_hooks import ConfigError, Levels
from llmaas_plugins.activation import active_suite

__all__ = ["LevelArgument", "check_levels", "levels_in_header", "levels_of"]

LevelArgument = float | Mapping[str, float] | Levels | None
"""One level for prompt and answer, ``{"prefill": 0.4, "decode": 0.8}``, ``Levels``, or None."""

_PHASES = {"prefill", "decode"}


def levels_of(value: object) -> Levels:
    """Return a ``LevelArgument`` as levels.

    Raises:
        ConfigError: The value has another form.
    """
    if isinstance(value, Levels):
        return value
    if not isinstance(value, Mapping):
        number: Any = value
        return Levels(number, number)
    if not value or not value.keys() <= _PHASES:
        found = ", ".join(map(repr, value)) or "an empty object"
        raise ConfigError(
            f"expected a level such as 0.6, or levels for prefill and decode, found {found}"
        )
    return Levels(**value)


def levels_in_header(text: str) -> Levels:
    """Return the levels of a header: ``0.6``, or ``0.4/0.8`` for prompt and answer.

    Raises:
        ConfigError: The header has another form.
    """
    try:
        prefill, *decode = map(float, text.split("/", 1))
    except ValueError:
        raise ConfigError(f"expected a level such as 0.6 or 0.4/0.8, found {text!r}") from None
    return Levels(prefill, *(decode or [prefill]))


def check_levels(levels: Levels) -> None:
    """Check that levels are available if any are asked for.

    Raises:
        ConfigError: Levels are asked for, but not available.
    """
    if not levels.are_named:
        return
    suite = active_suite()
    if suite is None or "elastic" not in suite.config.enabled():
        raise ConfigError("levels are not available: the plugin elastic is not on")
    problem = suite.plugin("elastic").problem()
    if problem is not None:
        raise ConfigError(f"levels are not available: {problem}")

"""The level that an app asks for, and which of a model's levels that is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar

from llmaas_hooks import ConfigError, Levels

__all__ = ["asked", "asking", "level", "level_index", "watchers"]

_ROUNDING = 1e-9

_NOTHING = Levels()

asked: ContextVar[Levels] = ContextVar("llmaas_elastic_asked", default=_NOTHING)
"""What this thread or task asks for."""

watchers: set[Callable[[], None]] = set()
"""Called when a block of ``level`` begins and when it ends: its contexts may be used at once."""


def level(
    level: float | None = None, *, prefill: float | None = None, decode: float | None = None
) -> AbstractContextManager[None]:
    """Use elastic models at a level inside the block, a share of their blocks' weights.

        with elastic.level(0.6):
            llm("Once upon a time")
        with elastic.level(prefill=0.4, decode=0.8):
            llm("Once upon a time")

    It holds for the requests that this thread or task starts inside the block, until they end. In
    nested blocks the inner one counts. Contexts that are used without a request (batches of the
    app's own) are at that level inside the block, whatever thread uses them, and at the configured
    one after it. Without the plugin nothing comes of it.

    Args:
        level: 0.2 to 1.0, of prompt and answer. Between two levels of the model it is the narrower.
        prefill: Of the prompt, instead of ``level``; neither leaves it as it would be.
        decode: From the first sampled token on; likewise.

    Raises:
        ConfigError: Nothing is asked for, or a level that does not exist.
    """
    levels = Levels(prefill, decode).over(Levels(level, level))
    if levels == _NOTHING:
        raise ConfigError("elastic.level() needs a level: level(0.6), or level(prefill=0.4)")
    return _block(levels)


@contextmanager
def asking(levels: Levels) -> Iterator[None]:
    """Ask for levels for the requests that are started inside the block, and for them alone."""
    token = asked.set(levels.over(asked.get()))
    try:
        yield
    finally:
        asked.reset(token)


def level_index(levels: Sequence[float], level: float) -> int:
    """Which of a model's levels, widest first, is the widest that is not above ``level``.

    The narrowest, if all are above it.
    """
    fit = (i for i, one in enumerate(levels) if one <= level + _ROUNDING)
    return next(fit, len(levels) - 1)


@contextmanager
def _block(levels: Levels) -> Iterator[None]:
    try:
        with asking(levels):
            _tell()
            yield
    finally:
        _tell()


def _tell() -> None:
    for told in tuple(watchers):
        told()

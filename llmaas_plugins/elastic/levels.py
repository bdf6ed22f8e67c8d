"""Level that an app asks for, and the model's level that serves it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar

from llmaas_hooks import ConfigError, Levels

__all__ = ["asked", "asking", "level", "level_index", "watchers"]

_ROUNDING = 1e-9

_NOTHING = Levels()

asked: ContextVar[Levels] = ContextVar("llmaas_elastic_asked", default=_NOTHING)
"""Levels that this thread or task asks for."""

watchers: set[Callable[[], None]] = set()
"""Functions to call when a block of ``level`` begins and when it ends.

A context may be used inside the block without a request, so it must switch at once.
"""


def level(
    level: float | None = None, *, prefill: float | None = None, decode: float | None = None
) -> AbstractContextManager[None]:
    """Use elastic models at a level inside the block; a level is a share of the blocks' weights.

        with elastic.level(0.6):
            llm("Once upon a time")
        with elastic.level(prefill=0.4, decode=0.8):
            llm("Once upon a time")

    The level holds for requests that this thread or task starts inside the block, until they end.
    In nested blocks the inner level counts. A context that is used without a request (for the app's
    own batches) has the level inside the block, whatever thread uses it. After the block it has the
    configured level. Without the plugin, the block has no effect.

    Args:
        level: Level of prompt and answer, 0.2 to 1.0. Between two levels of the model, the narrower
            one is used.
        prefill: Level of the prompt, instead of ``level``. If neither is given, the block does not
            change the prompt's level.
        decode: Level from the first sampled token on, instead of ``level``. If neither is given,
            the block does not change it.

    Raises:
        ConfigError: No level is given, or one that is out of range.
    """
    levels = Levels(prefill, decode).over(Levels(level, level))
    if levels == _NOTHING:
        raise ConfigError("elastic.level() needs a level: level(0.6), or level(prefill=0.4)")
    return _block(levels)


@contextmanager
def asking(levels: Levels) -> Iterator[None]:
    """Ask for levels only for the requests that are started inside the block."""
    token = asked.set(levels.over(asked.get()))
    try:
        yield
    finally:
        asked.reset(token)


def level_index(levels: Sequence[float], level: float) -> int:
    """Return the index of the widest level that is not above ``level``.

    ``levels`` is sorted from wide to narrow. If all are above ``level``, return the narrowest one's
    index.
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

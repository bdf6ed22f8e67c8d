"""Level that an app asks for, and the model's level that serves it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

from llmaas_hooks import ConfigError, Levels, request_scope

__all__ = ["level", "level_index"]

_ROUNDING = 1e-9


def level(
    level: float | None = None, *, prefill: float | None = None, decode: float | None = None
) -> AbstractContextManager[None]:
    """Use elastic models at a level inside the block; a level is a share of the blocks' weights.

        with elastic.level(0.6):
            llm("Once upon a time")
        with elastic.level(prefill=0.4, decode=0.8):
            llm("Once upon a time")

    The level holds for requests that this thread or task starts inside the block, until they end.
    In nested blocks the inner level counts. The level also holds for batches that the app
    evaluates itself inside the block. Without the plugin, the block has no effect.

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
    if levels == Levels():
        raise ConfigError("elastic.level() needs a level: level(0.6), or level(prefill=0.4)")
    return request_scope.at_levels(levels)


def level_index(levels: Sequence[float], level: float) -> int:
    """Return the index of the widest level that is not above ``level``.

    ``levels`` is sorted from wide to narrow. If all are above ``level``, return the narrowest one's
    index.
    """
    fit = (i for i, one in enumerate(levels) if one <= level + _ROUNDING)
    return next(fit, len(levels) - 1)

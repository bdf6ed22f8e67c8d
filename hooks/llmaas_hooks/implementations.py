"""One plugin's implementation of one hook, ready to be called."""

from __future__ import annotations

import inspect
import itertools
import json
import math
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import numpy as np
import pluggy

from llmaas_hooks.levels import Levels
from llmaas_hooks.memory import MemoryClaim
from llmaas_hooks.native import WeightClaim
from llmaas_hooks.promises import LevelTimes, RequestCost, ShorterPrompt
from llmaas_hooks.types import KVRestored

__all__ = ["Implementation", "running"]

running: ContextVar[tuple[str, str] | None] = ContextVar("llmaas_running", default=None)
"""Plugin and hook that were called last in this thread or task; deferred work belongs to them."""


_MOST_BYTES = 1 << 50
"""Largest size of memory that a plugin may claim."""

Check = Callable[[Any, Mapping[str, Any]], None]


@dataclass(frozen=True, slots=True)
class Implementation:
    """One plugin's implementation of one hook.

    Attributes:
        plugin: Name under which the plugin is registered.
        hook: Name of the hook.
        owner: The two names, for ``running``.
        function: The plugin's bound method.
        takes: Names of the hook's arguments that ``function`` takes, in its order.
        check: Check of what ``function`` returned, given the hook's arguments as well.
    """

    plugin: str
    hook: str
    owner: tuple[str, str]
    function: Callable[..., Any]
    takes: tuple[str, ...]
    check: Check

    @classmethod
    def of(cls, hook: pluggy.HookCaller, found: pluggy.HookImpl) -> Implementation:
        """Return the implementation that pluggy found.

        Raises:
            TypeError: The function would not be called as its author expects: it is a wrapper, a
                generator or a coroutine, or it has arguments with a default.
        """
        where = f"{hook.name} of {found.plugin_name!r}"
        if found.wrapper or found.hookwrapper:
            raise TypeError(f"{where} is a pluggy wrapper; expected a plain function")
        if inspect.isgeneratorfunction(found.function) or _is_async(found.function):
            raise TypeError(f"{where} is a generator or a coroutine; expected a plain function")
        if found.kwargnames:
            names = ", ".join(found.kwargnames)
            raise TypeError(
                f"{where} has a default for {names}; pluggy does not pass such arguments: "
                "remove the default"
            )
        owner = found.plugin_name, hook.name
        check = _CHECKS.get(hook.name, _check_nothing)
        return cls(*owner, owner, found.function, tuple(found.argnames), check)

    def __call__(self, arguments: Mapping[str, Any]) -> Any:
        """Call the function with those of ``arguments`` that it takes.

        Raises:
            TypeError: The function returned another type than the hook's specification says.
            Exception: Any exception of the function.
        """
        if running.get() is not self.owner:  # setting takes three times as long as looking
            running.set(self.owner)
        result = self.function(*map(arguments.__getitem__, self.takes))
        self.check(result, arguments)
        return result


def _is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)


def _check_nothing(result: Any, _: Mapping[str, Any]) -> None:
    if result is not None:
        raise _wrong(result, "None")


def _check_restored(result: Any, arguments: Mapping[str, Any]) -> None:
    if result is None:
        return
    if not isinstance(result, KVRestored):
        raise _wrong(result, "KVRestored or None")
    n_prompt = len(arguments["request"].tokens)
    if not 0 <= result.n_loaded <= result.n_tokens <= n_prompt:
        raise TypeError(f"returned {result}, expected n_loaded <= n_tokens <= {n_prompt}")


def _check_path(result: Any, _: Mapping[str, Any]) -> None:
    if result is not None and not (isinstance(result, str) and result):
        raise _wrong(result, "a path as str, or None")


def _check_turn(result: Any, _: Mapping[str, Any]) -> None:
    if result is not None and not (isinstance(result, int) and result >= 1):
        raise _wrong(result, "a number of tokens, at least 1, or None")


def _check_cost(result: Any, arguments: Mapping[str, Any]) -> None:
    if result is None:
        return
    if not isinstance(result, RequestCost):
        raise _wrong(result, "RequestCost or None")
    n_prompt, ready_s = len(arguments["request"].tokens), result.ready_s
    is_time = isinstance(ready_s, int | float) and 0 <= ready_s < math.inf
    if not (isinstance(result.n_ready, int) and 0 <= result.n_ready <= n_prompt and is_time):
        raise TypeError(
            f"returned n_ready {result.n_ready} and ready_s {ready_s}, expected at most "
            f"{n_prompt} tokens and a finite time"
        )
    levels = result.levels
    if not isinstance(levels, tuple) or not all(isinstance(one, LevelTimes) for one in levels):
        raise TypeError(f"returned levels {levels!r}, expected a tuple of LevelTimes")
    for one in levels:
        Levels(one.level)  # raises an error that says which numbers are levels
    for short in result.shorter:
        if not isinstance(short, ShorterPrompt):
            raise _wrong(short, "ShorterPrompt")
        Levels(prompt_share=short.share)
        seconds = 0 if short.seconds is None else short.seconds
        if not (1 <= short.n_tokens < n_prompt and 0 <= seconds < math.inf):
            raise TypeError(f"returned {short}, expected fewer than {n_prompt} tokens, and a time")


def _check_shortened(result: Any, arguments: Mapping[str, Any]) -> None:
    if result is None:
        return
    n_prompt = len(arguments["request"].tokens)
    if not (isinstance(result, np.ndarray) and result.dtype == np.int32 and result.ndim == 1):
        raise _wrong(result, "an int32 array of tokens, or None")
    if not 1 <= len(result) < n_prompt:
        raise TypeError(f"returned {len(result)} tokens, expected 1 to {n_prompt - 1}")


def _check_drafter(result: Any, _: Mapping[str, Any]) -> None:
    if result is not None and not callable(getattr(result, "propose", None)):
        raise _wrong(result, "a Drafter or None")


def _check_levels(result: Any, _: Mapping[str, Any]) -> None:
    if result is not None and not isinstance(result, Levels):
        raise _wrong(result, "Levels or None")


def _check_claims(result: Any, _: Mapping[str, Any]) -> None:
    if not isinstance(result, list) or not all(isinstance(one, WeightClaim) for one in result):
        raise _wrong(result, "list of WeightClaim")


def _check_memory(result: Any, _: Mapping[str, Any]) -> None:
    if not isinstance(result, list) or not all(isinstance(one, MemoryClaim) for one in result):
        raise _wrong(result, "list of MemoryClaim")
    for one in result:
        if not (isinstance(one.owner, str) and isinstance(one.why, str)):
            raise TypeError(f"returned a claim of {one.owner!r}, expected an owner and why as str")
        points = [(0, 0.0), *one.saved]
        is_ascending = all(a <= c and b <= d for (a, b), (c, d) in itertools.pairwise(points))
        sizes = (one.held, one.most, one.least, 0 if one.taken is None else one.taken)
        if not (all(map(_is_size, sizes)) and is_ascending and points[-1][1] < math.inf):
            raise TypeError(
                f"returned a claim of {one.owner!r} with {one.held} of {one.most} bytes, expected "
                f"sizes from 0 to {_MOST_BYTES}, and points that ascend from (0, 0) on"
            )


def _is_size(size: object) -> bool:
    return isinstance(size, Integral) and 0 <= int(size) <= _MOST_BYTES


def _check_freed(result: Any, _: Mapping[str, Any]) -> None:
    if not isinstance(result, int):
        raise _wrong(result, "int")


def _check_report(result: Any, _: Mapping[str, Any]) -> None:
    if not isinstance(result, dict):
        raise _wrong(result, "dict")
    json.dumps(result, allow_nan=False)  # a report without JSON would break the whole status


def _wrong(result: object, expected: str) -> TypeError:
    return TypeError(f"returned {type(result).__name__}, expected {expected}")


_CHECKS: Mapping[str, Check] = {
    "llmaas_model_path": _check_path,
    "llmaas_kv_restore": _check_restored,
    "llmaas_kv_evict": _check_freed,
    "llmaas_turn": _check_turn,
    "llmaas_cost": _check_cost,
    "llmaas_level": _check_levels,
    "llmaas_shorten": _check_shortened,
    "llmaas_draft": _check_drafter,
    "llmaas_status": _check_report,
    "llmaas_memory": _check_memory,
    "llmaas_weights": _check_claims,
}

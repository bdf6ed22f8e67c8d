"""Promises of latency that a call asks for in a body's field or a header."""

from __future__ import annotations

from collections.abc import Mapping

from llmaas_hooks import NO_PROMISE, ConfigError, Limit, Promise
from llmaas_plugins.activation import active_suite

__all__ = ["check_promise", "configured_promise", "promise_in_header", "promise_of"]

_LIMITS = {"ttft", "tpot"}


def promise_of(value: object) -> Promise:
    """Return a promise from ``{"ttft": "300 ms", "tpot": "60 %"}``, or from None.

    Raises:
        ConfigError: The value has another form.
    """
    if value is None:
        return NO_PROMISE
    if not isinstance(value, Mapping) or not value or not value.keys() <= _LIMITS:
        raise ConfigError(f"expected an object with ttft, tpot or both, found {str(value)[:80]!r}")
    return Promise(_limit(value, "ttft"), _limit(value, "tpot"))


def promise_in_header(text: str) -> Promise:
    """Return the promise of a header: ``300 ms/60 %``; either side of the slash may be empty.

    Raises:
        ConfigError: The header has another form.
    """
    ttft, _, tpot = text.partition("/")
    limits = [Limit.of(part) if part.strip() else None for part in (ttft, tpot)]
    promise = Promise(limits[0], limits[1])
    if not promise:
        raise ConfigError(f"expected limits such as 300 ms/60 ms, found {text!r}")
    return promise


def configured_promise(app: str | None) -> Promise:
    """Return the promise that the configuration gives to an app's calls."""
    suite = active_suite()
    if suite is None or "deadlines" not in suite.config.enabled():
        return NO_PROMISE
    found: Promise = suite.plugin("deadlines").promise_of(app)
    return found


def check_promise(promise: Promise) -> None:
    """Check that promises are kept if one is asked for.

    Raises:
        ConfigError: A promise is asked for, but the plugin that keeps it is not on.
    """
    suite = active_suite()
    if promise and (suite is None or "deadlines" not in suite.config.enabled()):
        raise ConfigError("promises are not available: the plugin deadlines is not on")


def _limit(values: Mapping[str, object], name: str) -> Limit | None:
    value = values.get(name)
    try:
        return None if value is None else Limit.of(value)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None

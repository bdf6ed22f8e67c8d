"""Errors of plugins: named, raised or logged, and counted."""

from __future__ import annotations

import contextlib
import logging
from concurrent.futures import ThreadPoolExecutor

import pytest
from hooked import Failing, Saver, manager, request

from llmaas_hooks import (
    ConfigError,
    ContextCreate,
    DecodeStep,
    KVRestored,
    PluginError,
    StoreError,
    hookimpl,
)


def test_raise_names_plugin_and_hook_and_chains():
    hooks = manager(saver=Saver(), bad=Failing())
    with pytest.raises(
        PluginError, match=r"plugin 'bad' failed in llmaas_context_create"
    ) as caught:
        hooks.context_create(ContextCreate(1, None))
    assert (caught.value.plugin, caught.value.hook) == ("bad", "llmaas_context_create")
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_the_suites_own_errors_are_wrapped_too():
    with pytest.raises(PluginError) as caught:
        manager(bad=Failing(StoreError("disk"))).context_create(ContextCreate(1, None))
    assert isinstance(caught.value.__cause__, StoreError)


def test_log_goes_on(caplog):
    with caplog.at_level(logging.ERROR, "llmaas.hooks"):
        manager("log", bad=Failing()).context_create(ContextCreate(1, None))
    assert "plugin 'bad' failed in llmaas_context_create: ZeroDivisionError: oops" in caplog.text
    assert "deeper" in caplog.text  # with the plugin's traceback


def test_a_mistake_of_the_users_is_logged_as_a_message(caplog):
    found = Failing(ConfigError("no level 3; levels are 1 and 2."))
    with caplog.at_level(logging.DEBUG, "llmaas.hooks"):
        manager("log", bad=found).context_create(ContextCreate(1, None))
    said, cause = caplog.records
    assert "ConfigError: no level 3; levels are 1 and 2. The app's call continues" in said.message
    assert not said.exc_info
    assert (cause.levelname, bool(cause.exc_info)) == ("DEBUG", True)


def test_an_error_that_cannot_be_printed_is_named_all_the_same():
    class Unprintable(Exception):  # noqa: N818  not one of ours
        def __str__(self):
            raise RuntimeError

    hooks = manager("log", bad=Failing(Unprintable()))
    hooks.context_create(ContextCreate(1, None))
    last = hooks.errors()["bad"]["llmaas_context_create"]["last"]
    assert last == "plugin 'bad' failed in llmaas_context_create: Unprintable"


def test_keyboard_interrupt_is_nobodys_plugin_error():
    with pytest.raises(KeyboardInterrupt):
        manager("log", bad=Failing(KeyboardInterrupt())).context_create(ContextCreate(1, None))


def test_raise_raises_the_first_and_logs_the_others(caplog):
    hooks = manager("raise", b=Failing(OSError("second")), a=Failing(OSError("first")))
    with pytest.raises(PluginError, match="first"):
        hooks.context_create(ContextCreate(1, None))
    assert "second" in caplog.text
    assert "first" not in caplog.text


def test_repeated_failures_are_counted_not_logged(caplog):
    hooks = manager("log", bad=Failing(), worse=Failing())
    for _ in range(500):
        hooks.context_create(ContextCreate(1, None))
    assert len(caplog.records) == 2  # one per plugin
    last = "plugin 'bad' failed in llmaas_context_create: ZeroDivisionError: oops"
    assert hooks.errors()["bad"] == {"llmaas_context_create": {"count": 500, "last": last}}
    caplog.clear()
    hooks.shutdown()
    assert f"500 times: {last}" in caplog.messages
    assert len(caplog.messages) == 4  # the plugins' shutdown errors, and one summary each


@pytest.mark.parametrize("on_error", ["log", "raise"])
def test_errors_that_are_raised_are_counted_too(on_error):
    hooks = manager(on_error, bad=Failing())
    for _ in range(3):
        with contextlib.suppress(PluginError):
            hooks.context_create(ContextCreate(1, None))
    assert hooks.errors()["bad"]["llmaas_context_create"]["count"] == 3


def test_failures_of_several_threads_are_all_counted(caplog):
    hooks = manager("log", bad=Failing())

    def fail():
        for _ in range(200):
            hooks.context_create(ContextCreate(1, None))

    with ThreadPoolExecutor(8) as pool:
        for job in [pool.submit(fail) for _ in range(8)]:
            job.result()
    assert hooks.errors()["bad"]["llmaas_context_create"]["count"] == 1600
    assert len(caplog.records) == 1


def test_handle_follows_on_error(caplog):
    error = PluginError("bad", "llmaas_kv_restore", OSError("torn"))
    with pytest.raises(PluginError):
        manager("raise").handle(error)
    hooks = manager("log")
    hooks.handle(error)
    assert "torn" in caplog.text
    assert hooks.errors()["bad"]["llmaas_kv_restore"]["count"] == 1


@pytest.mark.parametrize("on_error", ["log", "raise"])
def test_restore_always_raises_and_asks_no_other(on_error):
    class Restorer:
        @hookimpl
        def llmaas_kv_restore(self):
            raise AssertionError("asked about cells in doubt")

    with pytest.raises(PluginError, match="'bad' failed in llmaas_kv_restore"):
        manager(on_error, other=Restorer(), bad=Failing()).kv_restore(request())


def test_a_wrong_restore_is_blamed_on_the_plugin_that_restored():
    """Its own batches call the hooks of others in between."""

    class Restorer:
        @hookimpl
        def llmaas_kv_restore(self):
            hooks.evaluated(DecodeStep(1, 2, 0.0))
            return KVRestored(0, 0)

    class Observer:
        @hookimpl
        def llmaas_decode(self, step):
            pass

    hooks = manager(observer=Observer(), restorer=Restorer())
    assert hooks.kv_restore(request()) == KVRestored(0, 0)
    error = hooks.blame(ValueError("the engine has fewer cells"))
    assert (error.plugin, error.hook) == ("restorer", "llmaas_kv_restore")


@pytest.mark.parametrize("is_ending", [False, True])
def test_engines_that_ended_are_no_failure_at_the_end(is_ending):
    """Another thread of the app may still generate while the suite is deactivated."""

    class Late:
        @hookimpl
        def llmaas_decode(self, step):
            raise ReferenceError("the suite was deactivated")

        @hookimpl
        def llmaas_kv_restore(self):
            raise ReferenceError("the suite was deactivated")

    hooks = manager(late=Late())
    hooks.is_ending = is_ending
    with contextlib.nullcontext() if is_ending else pytest.raises(PluginError):
        hooks.decode(DecodeStep(1, 1, 0.0))
    with pytest.raises(PluginError) as found:  # the caller drops the cells first
        hooks.kv_restore(request())
    with contextlib.nullcontext() if is_ending else pytest.raises(PluginError):
        hooks.handle(found.value)
    assert bool(hooks.errors()) == (not is_ending)


def test_a_failure_of_prefill_does_not_keep_plugins_from_the_decode():
    steps = []

    class Decodes:
        @hookimpl
        def llmaas_prefill(self, step):
            raise OSError("full")

        @hookimpl
        def llmaas_decode(self, step):
            steps.append(step)

    step = DecodeStep(1, 2, 0.0)
    with pytest.raises(PluginError, match="llmaas_prefill"):
        manager(bad=Decodes()).evaluated(step)
    assert steps == [step]

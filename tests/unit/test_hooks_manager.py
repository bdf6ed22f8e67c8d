"""The façade over pluggy: registration, errors, and who is told what."""

from __future__ import annotations

import logging
import subprocess
import sys

import numpy as np
import pytest

from llmaas_hooks import (
    ContextCreate,
    HookManager,
    LlmaasError,
    PluginError,
    Request,
    RequestStats,
    StoreError,
    hookimpl,
    specs,
)

STATS = RequestStats(3, 0, 1, 0.0, 0.1, 0.2)


class Saver:
    def __init__(self, freed=0):
        self.calls = []
        self.freed = freed

    @hookimpl
    def llmaas_kv_evict(self, context_id):
        self.calls.append(("evict", context_id))
        return self.freed

    @hookimpl
    def llmaas_status(self):
        return {"freed": self.freed}

    @hookimpl
    def llmaas_request_end(self, stats):
        self.calls.append(("end", stats))

    @hookimpl
    def llmaas_shutdown(self):
        self.calls.append(("shutdown",))


class Failing:
    def __init__(self, error=None):
        self.error = error or ZeroDivisionError("oops")

    @hookimpl
    def llmaas_context_create(self, create):
        self.deeper()

    @hookimpl
    def llmaas_kv_restore(self, request):
        self.deeper()

    @hookimpl
    def llmaas_kv_evict(self, context_id):
        self.deeper()

    @hookimpl
    def llmaas_status(self):
        self.deeper()

    @hookimpl
    def llmaas_shutdown(self):
        self.deeper()

    def deeper(self):
        raise self.error


def manager(on_error="raise", **plugins):
    hooks = HookManager(on_error)
    for name, plugin in plugins.items():
        hooks.register(name, plugin)
    return hooks


def request():
    return Request(engine=None, tokens=np.zeros(3, np.int32), context_id=None)


def test_the_contract_imports_no_engine():
    code = (
        "import sys, llmaas_hooks; sys.exit('llama_cpp' in sys.modules or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_misspelt_hook_is_refused_and_leaves_nothing():
    class Misspelt:
        @hookimpl
        def llmaas_logit(self, view):
            pass

    hooks = manager()
    with pytest.raises(PluginError, match=r"'typo'.*registration.*llmaas_logit"):
        hooks.register("typo", Misspelt())
    assert hooks.names() == []
    hooks.register("saver", Saver())  # and does not spoil the next one
    assert hooks.names() == ["saver"]


def test_wrong_argument_is_refused_and_leaves_nothing():
    class Wrong:
        @hookimpl
        def llmaas_request_end(self, stats):
            pass

        @hookimpl
        def llmaas_status(self, nonsense):
            pass

    hooks = manager()
    with pytest.raises(PluginError, match="nonsense"):
        hooks.register("wrong", Wrong())
    assert hooks.names() == []
    assert not hooks.listens("llmaas_request_end")


def test_registration_runs_no_property():
    class Lazy(Saver):
        @property
        def store(self):
            raise AssertionError("opened at registration")

    assert manager(lazy=Lazy()).names() == ["lazy"]


def test_listens_and_implemented():
    hooks = manager(saver=Saver())
    assert hooks.listens("llmaas_status")
    assert not hooks.listens("llmaas_logits")
    assert hooks.implemented("saver") == [
        "llmaas_kv_evict",
        "llmaas_request_end",
        "llmaas_shutdown",
        "llmaas_status",
    ]


def test_an_implementation_may_take_fewer_arguments():
    saver = Saver()
    manager(saver=saver).request_end(request(), STATS)
    assert saver.calls == [("end", STATS)]


def test_every_hook_has_a_method_and_is_silent_without_plugins():
    hooks = manager()
    arguments = {"llmaas_kv_evict": ("c",), "llmaas_status": (), "llmaas_shutdown": ()}
    for name in specs.__all__:
        n_arguments = getattr(specs, name).__code__.co_argcount
        method = getattr(hooks, name.removeprefix("llmaas_"))
        method(*arguments.get(name, [None] * n_arguments))


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


def test_keyboard_interrupt_is_nobodys_plugin_error():
    with pytest.raises(KeyboardInterrupt):
        manager("log", bad=Failing(KeyboardInterrupt())).context_create(ContextCreate(1, None))


def test_handle_follows_on_error(caplog):
    with pytest.raises(LlmaasError):
        manager("raise").handle(LlmaasError("x"))
    with caplog.at_level(logging.ERROR):
        manager("log").handle(LlmaasError("x"))
    assert "x" in caplog.text


@pytest.mark.parametrize("on_error", ["log", "raise"])
def test_restore_always_raises(on_error):
    with pytest.raises(PluginError, match="llmaas_kv_restore"):
        manager(on_error, bad=Failing()).kv_restore(request())


def test_hook_llmaas_kv_evict():
    first, second = Saver(3), Saver(4)
    assert manager(a=first, b=second).kv_evict("chat-1") == 7
    assert first.calls == second.calls == [("evict", "chat-1")]


@pytest.mark.parametrize("on_error", ["log", "raise"])
def test_hook_llmaas_kv_evict_always_raises(on_error):
    with pytest.raises(PluginError, match="llmaas_kv_evict"):
        manager(on_error, bad=Failing()).kv_evict("chat-1")


def test_hook_llmaas_status():
    assert manager(a=Saver(1), b=Saver(2)).status() == {"a": {"freed": 1}, "b": {"freed": 2}}


def test_hook_llmaas_status_raises():
    with pytest.raises(ZeroDivisionError):
        manager("log", bad=Failing()).status()


def test_hook_llmaas_shutdown_reaches_all_and_forgets_them(caplog):
    first, second = Saver(), Saver()
    hooks = manager(a=first, bad=Failing(), b=second)
    hooks.shutdown()
    assert first.calls == second.calls == [("shutdown",)]
    assert "plugin 'bad' failed in llmaas_shutdown" in caplog.text
    assert hooks.names() == []
    hooks.shutdown()
    hooks.request_end(request(), STATS)  # a generator that outlives the suite
    assert first.calls == second.calls == [("shutdown",)]

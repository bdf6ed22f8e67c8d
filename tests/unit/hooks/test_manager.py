"""The façade over pluggy: registration, and the order and arguments of calls."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hooked import STATS, Saver, manager, request

from llmaas_hooks import (
    PluginError,
    hookimpl,
    specs,
)


def test_the_contract_imports_no_engine():
    code = (
        "import sys, llmaas_hooks; sys.exit('llama_cpp' in sys.modules or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_misspelled_hook_is_refused_and_leaves_nothing():
    class Misspelled:
        @hookimpl
        def llmaas_logit(self, view):
            pass

    hooks = manager()
    with pytest.raises(PluginError, match=r"'typo'.*registration.*llmaas_logit"):
        hooks.register("typo", Misspelled())
    assert hooks.names() == []
    hooks.register("saver", Saver())  # the error does not spoil the next registration
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
    arguments |= {"llmaas_cost": (request(),), "llmaas_level": (None,)}
    arguments |= {"llmaas_kv_save": (request(), None)}
    for name in specs.__all__:
        n_arguments = getattr(specs, name).__code__.co_argcount
        method = getattr(hooks, name.removeprefix("llmaas_"))
        method(*arguments.get(name, [None] * n_arguments))


class Wrapper:
    @hookimpl(wrapper=True)
    def llmaas_status(self):
        return (yield)


class OldWrapper:
    @hookimpl(hookwrapper=True)
    def llmaas_status(self):
        yield


class Generator:
    @hookimpl
    def llmaas_status(self):
        yield {}


class Coroutine:
    @hookimpl
    async def llmaas_status(self):
        return {}


class WithDefault:
    @hookimpl
    def llmaas_request_end(self, request, stats=None):
        pass


@pytest.mark.parametrize(
    ("plugin", "problem"),
    [
        (Wrapper(), "llmaas_status of 'odd' is a pluggy wrapper"),
        (OldWrapper(), "llmaas_status of 'odd' is a pluggy wrapper"),
        (Generator(), "is a generator or a coroutine; expected a plain function"),
        (Coroutine(), "is a generator or a coroutine; expected a plain function"),
        (WithDefault(), "has a default for stats; pluggy does not pass such arguments"),
    ],
)
def test_what_would_not_be_called_as_written_is_refused(plugin, problem):
    hooks = manager(saver=Saver(1))
    with pytest.raises(PluginError, match=problem) as caught:
        hooks.register("odd", plugin)
    assert (caught.value.plugin, caught.value.hook) == ("odd", "registration")
    assert hooks.names() == ["saver"]
    assert hooks.status() == {"saver": {"freed": 1}}


def test_a_name_that_is_taken_stays_its_owners():
    hooks = manager(saver=Saver(1))
    with pytest.raises(PluginError, match="already registered"):
        hooks.register("saver", Saver(2))
    assert hooks.status() == {"saver": {"freed": 1}}


def test_order_is_pluggys():
    order = []

    def plugin(name, **options):
        class Ordered:
            @hookimpl(**options)
            def llmaas_request_end(self):
                order.append(name)

        return Ordered()

    hooks = manager(
        last=plugin("last", trylast=True),
        a=plugin("a"),
        first=plugin("first", tryfirst=True),
        b=plugin("b"),
    )
    hooks.request_end(request(), STATS)
    assert order == ["first", "b", "a", "last"]


def test_a_hook_of_a_later_version_may_be_optional():
    class Modern(Saver):
        @hookimpl(optionalhook=True)
        def llmaas_from_the_future(self, thing):
            pass

    assert manager(modern=Modern(3)).status() == {"modern": {"freed": 3}}

"""The façade over pluggy: registration, errors, and the order and arguments of calls."""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from llmaas_hooks import (
    ConfigError,
    ContextCreate,
    HookManager,
    KVRestored,
    Levels,
    ModelLoad,
    PluginError,
    Request,
    RequestStats,
    StoreError,
    WeightClaim,
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
    def llmaas_level(self, request):
        self.deeper()

    @hookimpl
    def llmaas_kv_restore(self, request):
        self.deeper()

    @hookimpl
    def llmaas_weights(self, load):
        self.deeper()

    @hookimpl
    def llmaas_native_context(self, context):
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


@pytest.mark.parametrize(
    "result",
    [
        7,
        True,
        KVRestored(n_tokens=4, n_loaded=0),  # of a prompt of 3
        KVRestored(n_tokens=2, n_loaded=3),
        KVRestored(n_tokens=-1, n_loaded=-1),
        KVRestored(n_tokens="3", n_loaded=0),
    ],
)
def test_restored_cells_that_cannot_be(result):
    class Restorer:
        @hookimpl
        def llmaas_kv_restore(self):
            return result

    with pytest.raises(PluginError, match=r"'p' failed in llmaas_kv_restore: TypeError"):
        manager(p=Restorer()).kv_restore(request())


@pytest.mark.parametrize(
    ("hook", "result", "problem"),
    [
        ("llmaas_request_end", 1, "returned int, expected None"),
        ("llmaas_kv_evict", None, "returned NoneType, expected int"),
        ("llmaas_kv_evict", "12", "returned str, expected int"),
        ("llmaas_level", 0.5, "returned float, expected Levels or None"),
        ("llmaas_weights", None, "returned NoneType, expected list of WeightClaim"),
        ("llmaas_weights", ["output.weight"], "returned list, expected list of WeightClaim"),
        ("llmaas_status", None, "returned NoneType, expected dict"),
        ("llmaas_status", {"x": np.int64(1)}, "not JSON serializable"),
        ("llmaas_status", {"x": float("nan")}, "not JSON compliant"),
    ],
)
def test_wrong_results_are_errors(hook, result, problem):
    plugin = type("Odd", (), {hook: hookimpl(lambda self: result, specname=hook)})()
    call = {
        "llmaas_request_end": lambda hooks: hooks.request_end(request(), STATS),
        "llmaas_kv_evict": lambda hooks: hooks.kv_evict("chat-1"),
        "llmaas_level": lambda hooks: hooks.level(request()),
        "llmaas_weights": lambda hooks: hooks.weights(ModelLoad("model.gguf", None), {}),
        "llmaas_status": lambda hooks: hooks.status(),
    }[hook]
    with pytest.raises(PluginError, match=f"'odd' failed in {hook}: .*{problem}"):
        call(manager(odd=plugin))


class Claiming:
    def __init__(self, *patterns):
        self.claims = [WeightClaim(pattern, rows=(None, 8)) for pattern in patterns]
        self.contexts = []

    @hookimpl
    def llmaas_weights(self, load):
        return self.claims if load.path == "model.gguf" else []

    @hookimpl
    def llmaas_native_context(self, context):
        self.contexts.append(context)


def test_hook_llmaas_weights_says_whose_each_claim_is():
    first, second = Claiming("output.weight", "blk.*"), Claiming("token_embd.weight")
    hooks = manager("log", a=first, bad=Failing(), b=second)
    claims = [("b", *second.claims), *(("a", claim) for claim in first.claims)]
    assert hooks.weights(ModelLoad("model.gguf", None), {}) == claims
    assert hooks.weights(ModelLoad("other.gguf", None), {}) == []


def test_hook_llmaas_native_context_reaches_all():
    first, second, context = Claiming(), Claiming(), object()
    manager("log", a=first, bad=Failing(), b=second).native_context(context)
    assert first.contexts == second.contexts == [context]


def test_hook_llmaas_kv_evict():
    first, second = Saver(3), Saver(4)
    assert manager(a=first, b=second).kv_evict("chat-1") == 7
    assert first.calls == second.calls == [("evict", "chat-1")]


@pytest.mark.parametrize("on_error", ["log", "raise"])
def test_hook_llmaas_kv_evict_always_raises_after_all_were_asked(on_error):
    first, second = Saver(3), Saver(4)
    with pytest.raises(PluginError, match="llmaas_kv_evict"):
        manager(on_error, a=first, bad=Failing(), b=second).kv_evict("chat-1")
    assert first.calls == second.calls == [("evict", "chat-1")]


def choosing(levels):
    return type("Chooser", (), {"llmaas_level": hookimpl(lambda self, request: levels)})()


def test_hook_llmaas_level_is_that_of_the_first_who_chooses():
    half, silent = choosing(Levels(decode=0.5)), choosing(None)
    assert manager().level(request()) is None
    assert manager(a=silent).level(request()) is None
    hooks = manager("log", c=choosing(Levels(1.0)), b=half, a=silent, bad=Failing())
    assert hooks.level(request()) == Levels(decode=0.5)
    assert "oops" in hooks.errors()["bad"]["llmaas_level"]["last"]
    with pytest.raises(PluginError, match="'bad' failed in llmaas_level"):
        manager("raise", b=half, bad=Failing()).level(request())


def test_levels_are_checked_where_they_are_made():
    assert Levels(0.2, 1).over(Levels(0.5, 0.5)) == Levels(0.2, 1)
    assert Levels(decode=0.3).over(Levels(0.6, 0.7)) == Levels(0.6, 0.3)
    assert Levels(0.4).over(None) == Levels(0.4)
    for wrong in (0.19, 1.01, 60, -0.5, float("nan"), "0.6", True):
        with pytest.raises(ConfigError, match=r"decode must be a number from 0\.2 to 1\.0, found"):
            Levels(1.0, wrong)


def test_hook_llmaas_status():
    assert manager(a=Saver(1), b=Saver(2)).status() == {"a": {"freed": 1}, "b": {"freed": 2}}


def test_hook_llmaas_status_of_one_that_fails_hides_no_other():
    hooks = manager("log", a=Saver(1), bad=Failing(), b=Saver(2))
    problem = "plugin 'bad' failed in llmaas_status: ZeroDivisionError: oops"
    assert hooks.status() == {"a": {"freed": 1}, "bad": {"error": problem}, "b": {"freed": 2}}
    with pytest.raises(PluginError, match="'bad' failed in llmaas_status"):
        manager("raise", a=Saver(1), bad=Failing()).status()


def test_deferred_work_fails_in_the_name_of_its_hook(caplog):
    jobs = []

    class Deferring:
        @hookimpl
        def llmaas_kv_save(self):
            jobs.append(hooks.guarded(lambda: 1 / 0))

    hooks = manager("raise", lazy=Deferring())
    hooks.kv_save(request(), None)
    for _ in range(3):
        jobs[0]()  # no call of the app is left to raise into, so nothing is raised
    assert len(caplog.records) == 1
    found = hooks.errors()["lazy"]["llmaas_kv_save (deferred)"]
    assert found["count"] == 3
    assert "ZeroDivisionError" in found["last"]


def test_hook_llmaas_shutdown_goes_on_after_ctrl_c():
    first, second = Saver(), Saver()
    hooks = manager(a=first, bad=Failing(KeyboardInterrupt()), b=second)
    with pytest.raises(KeyboardInterrupt):
        hooks.shutdown()
    assert first.calls == second.calls == [("shutdown",)]
    assert hooks.names() == []


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

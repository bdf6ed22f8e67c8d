"""Results of hooks are checked, and plugins are asked in their order."""

from __future__ import annotations

import numpy as np
import pytest
from hooked import STATS, Failing, Saver, manager, request

from llmaas_hooks import (
    ConfigError,
    KVRestored,
    Levels,
    ModelLoad,
    PluginError,
    WeightClaim,
    hookimpl,
)


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
        ("llmaas_draft", [7], "returned list, expected a Drafter or None"),
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
        "llmaas_draft": lambda hooks: hooks.draft(request(), None),
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
    hooks = manager("log", c=choosing(Levels(1.0, 0.8)), b=half, a=silent, bad=Failing())
    assert hooks.level(request()) == Levels(1.0, 0.5)
    assert "oops" in hooks.errors()["bad"]["llmaas_level"]["last"]
    with pytest.raises(PluginError, match="'bad' failed in llmaas_level"):
        manager("raise", b=half, bad=Failing()).level(request())


def test_the_choice_at_the_first_token_goes_with_the_level_that_it_replaces():
    choose = max
    late = Levels(0.5, 0.6, at_first_token=choose)
    assert Levels(0.9).over(late) == Levels(0.9, 0.6, at_first_token=choose)
    assert Levels(decode=0.9).over(late) == Levels(0.5, 0.9)
    assert late.over(Levels(0.9, 0.9, at_first_token=min)) == late
    with pytest.raises(ConfigError, match="at_first_token replaces the level of decode"):
        Levels(0.5, at_first_token=choose)


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

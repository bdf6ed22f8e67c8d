"""One memory budget for contexts and weights, with the real plugins and a real model."""

from __future__ import annotations

import contextlib
import os
import shutil
import time

import pytest
from budgets import MIB
from flash_apps import run
from llama_cpp import Llama
from packed_models import pack

from llmaas_hooks import HookManager, MemoryClaim, PluginError, UnmetBudgetError, hookimpl
from llmaas_plugins import activate, process_memory
from llmaas_plugins.machine import resident_bytes

SETTINGS = {"n_ctx": 512, "n_threads": 1, "n_threads_batch": 1, "verbose": False}
PROMPTS = [[1, 300 + i, *range(50, 200)] for i in range(4)]
ENDING = [*range(400, 420)]

PRELUDE = """
import time
settings = dict(n_ctx=512, n_batch=64, n_threads=1, n_threads_batch=1, verbose=False)
def suite_of(budget, **table):
    kv = {"codec": "lossless", "disk_budget": 0, "recompute": False} | table
    flash = {"arena": 4 * MIB}
    plugins = {"kv_chunks": kv, "flash_weights": flash}
    return activate({"on_error": "raise", "memory": {"budget": budget}, "plugins": plugins})
def ask(llama, i, n=4):
    prompt = [1, 300 + i] + [(7 * i + j) % 2000 + 50 for j in range(150)]
    stream = llama.generate(prompt, temp=0.0)
    found = [next(stream) for _ in range(n)]
    stream.close()
    return found
def memory():
    status = suite.status()
    return status["plugins"]["memory"] | status["memory"]
"""


@pytest.fixture(scope="session")
def reference_model(packaged_model):
    """Return the packaged model, whose contexts and weights fill budgets."""
    return packaged_model


@pytest.fixture(scope="module")
def packed(reference_model, tmp_path_factory):
    path = tmp_path_factory.mktemp("packed") / "model.gguf"
    shutil.copyfile(reference_model, path)
    pack(path)
    return path


def config(budget, **plugins):
    return {"on_error": "raise", "memory": {"budget": budget}, "plugins": plugins}


def answers(llama):
    """Return the answers of contexts that are used in turn, twice."""
    found = []
    for ending in ([], ENDING):
        for prompt in PROMPTS:
            stream = llama.generate(prompt + ending, temp=0.0)
            found.append([next(stream) for _ in range(3)])
            stream.close()
    return found


def test_hook_llmaas_memory():
    claims = [MemoryClaim("buffers", 5, 10, ((0, 0.0), (10, 0.5)), lambda _: None)]

    class Plugin:
        @hookimpl
        def llmaas_memory(self):
            return claims

    class Liar:
        @hookimpl
        def llmaas_memory(self):
            return [MemoryClaim("buffers", 5, 10, ((4, 0.5), (10, 0.1)), lambda _: None)]

    hooks = HookManager("log")
    hooks.register("p", Plugin())
    hooks.register("liar", Liar())
    assert hooks.memory() == claims
    assert "ascend from (0, 0)" in hooks.errors()["liar"]["llmaas_memory"]["last"]


@pytest.mark.slow
def test_weights_and_contexts_share_a_budget(packed):
    """Both are told, the text is vanilla's, and the process stays within the budget."""
    script = """
llama = Llama(path, **settings)
expected = [ask(llama, i % 6) for i in range(18)]
llama.close()
budget = resident_bytes() + 130 * MIB
suite = suite_of(budget)
llama = Llama(path, **settings)
found = [ask(llama, i % 6) for i in range(18)]
report, seen = memory(), peak()
llama.close()
suite.deactivate()
print(json.dumps([found == expected, report, seen - budget]))
"""
    is_same, report, over = run(packed, PRELUDE + script)
    assert is_same
    assert over <= 0
    owners = {one["owner"]: one for one in report["owners"] if one["kind"] == "movable"}
    assert owners.keys() == {"weights kept in memory", "contexts in RAM"}
    assert owners["contexts in RAM"]["bytes"] > 0
    assert report["budget"] >= report["in_force"] > 0


@pytest.mark.slow
def test_a_lower_budget_is_obeyed_before_the_call_returns_and_a_raised_one_used(packed):
    script = """
start = resident_bytes()
suite = suite_of(start + 130 * MIB)
llama = Llama(path, **settings)
for i in range(6): ask(llama, i)
shared, flash = suite.plugin("memory"), suite.plugin("flash_weights")
def kept():
    return flash.llmaas_status()["models"][0]["kept_bytes"]
def least():
    try:
        shared.set_budget(MIB)
    except MemoryError as error:
        return int(str(error).split("expected ")[1].split(" MiB")[0])
before, lowest = kept(), least()
shared.set_budget((lowest + 3) * MIB)
over, lowered = resident_bytes() - (lowest + 3) * MIB, kept()
shared.set_budget(start + 130 * MIB)
ask(llama, 1)
time.sleep(0.3)
ask(llama, 2)
raised = kept()
llama.close()
suite.deactivate()
print(json.dumps([before, lowered, raised, over]))
"""
    before, lowered, raised, over = run(packed, PRELUDE + script)
    assert over <= 0
    assert lowered < min(before, raised)


def test_a_model_in_memory_that_does_not_fit_is_refused(reference_model):
    size = reference_model.stat().st_size
    refused = pytest.raises(PluginError, match=r"budget of \d+ MiB cannot be met.* or more")
    with (
        activate(config(resident_bytes() + 4 * MIB, kv_chunks={"disk_budget": 0})),
        refused as found,
    ):
        Llama(str(reference_model), n_ctx=4096, verbose=False)
    assert isinstance(found.value.__cause__, UnmetBudgetError)
    with activate(config(resident_bytes() + 4 * size + 256 * MIB, kv_chunks={"disk_budget": 0})):
        Llama(str(reference_model), n_ctx=4096, verbose=False).close()


def test_contexts_take_no_more_than_the_budget_leaves_without_streaming(reference_model):
    with contextlib.closing(Llama(str(reference_model), **SETTINGS)) as llama:
        expected = answers(llama)
    budget = resident_bytes() + 200 * MIB
    table = {"disk_budget": 0, "codec": "lossless", "recompute": False}
    with (
        activate(config(budget, kv_chunks=table)) as active,
        contextlib.closing(Llama(str(reference_model), **SETTINGS)) as llama,
    ):
        assert answers(llama) == expected
        before = active.status()["plugins"]["kv_chunks"]
        assert before["restored_tokens"] > 0
        lower = resident_bytes() + 5 * MIB  # 6 MiB are the reserve
        active.plugin("memory").set_budget(lower)
        after = active.status()["plugins"]["kv_chunks"]
        assert after["ram_bytes"] < before["ram_bytes"]
        assert answers(llama) == expected
        assert resident_bytes() <= lower
    assert process_memory.budget() is None


def test_nothing_is_divided_without_plugins_or_without_a_budget(reference_model):
    with activate({"memory": {"budget": "1 GiB"}}) as active:
        assert "memory" not in active.status()["plugins"]
    with activate({"plugins": {"kv_chunks": {"disk_budget": 0}}}) as active:
        assert "memory" not in active.status()["plugins"]
        assert process_memory.budget() is None


def test_a_forked_child_keeps_the_budget_with_a_thread_of_its_own(reference_model):
    with activate(config("2 GiB", kv_chunks={"disk_budget": 0})) as active:
        llama = Llama(str(reference_model), **SETTINGS)
        answers(llama)
        active.settle()
        child = os.fork()
        if child == 0:
            status = 1
            with contextlib.suppress(BaseException):
                import threading

                names = [thread.name for thread in threading.enumerate()]
                report = active.status()["plugins"]["memory"]
                time.sleep(0.7)  # a look, which must find no lock that is held forever
                active.plugin("memory").set_budget("1 GiB")
                status = 0 if "llmaas-memory" in names and report["budget"] == 2 << 30 else 2
            os._exit(status)
        _, found = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(found) == 0
        assert process_memory.budget() == 2 << 30
        llama.close()


@pytest.mark.slow
def test_forks_while_memory_is_looked_at(reference_model, monkeypatch):
    """A fork waits for a look before it takes the locks that the look needs."""
    monkeypatch.setattr("llmaas_plugins.memory.shared._EVERY_S", 0.001)
    with (
        activate(config("2 GiB", kv_chunks={"disk_budget": 0})) as active,
        contextlib.closing(Llama(str(reference_model), **SETTINGS)) as llama,
    ):
        answers(llama)
        active.settle()
        for _ in range(20):
            child = os.fork()
            if child == 0:
                kinds = {one["kind"] for one in active.memory()["owners"]}
                os._exit(0 if "movable" in kinds else 1)
            _, found = os.waitpid(child, 0)
            assert os.waitstatus_to_exitcode(found) == 0

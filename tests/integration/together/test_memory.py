"""One budget for all plugins: kept at every moment, while the app asks and the datastore learns."""

from __future__ import annotations

import shutil

import pytest
from budgets import is_streamed
from cgroups import memory_group
from datastores import CONVERSATIONS, built
from flash_apps import run
from gguf import GGMLQuantizationType
from packed_models import pack
from preparing import prepare
from soak import scale
from together import ENGINE, SETTINGS

from llmaas_eval.models import Shape, write_random_model

SHAPE = Shape(n_layer=6, n_embd=512, n_head=8, n_head_kv=8, n_ff=1024, n_ctx=512)
"""A shape with 20 MB of weights in Q8_0."""
BUDGET = 160 << 20
"""Budget with which some weights are streamed. The process gets nine tenths of its cgroup."""
SCRIPT = """
import time
from pathlib import Path
from llmaas_hooks import serving_context
from llmaas_plugins import deadlines, elastic
from llmaas_plugins.chats.exports import Message
from llmaas_plugins.knn_lm.build.inbox import remember
from llmaas_plugins.server import import_server
folder, settings = Path(path).parent, ENGINE
import_server()
def plugins():
    return {
        "kv_chunks": {"store": str(folder / "kv"), "codec": "lossless", "recompute": False,
                      "parked_tokens": 256},
        "flash_weights": {"arena": MIB},
        "elastic": {},
        "knn_lm": {"store": str(folder / "knn"), "alpha": 0.0, "drafts": True, "learn": True,
                   "idle_s": 0.05},
        "deadlines": {},
    }
def ask(llama, i, n=4):
    prompt = [1, 300 + i] + [(7 * i + j) % 2000 + 50 for j in range(40)]
    with serving_context(f"{i}", f"app {i % 2}"), deadlines.slo(ttft="3000 s", tpot="60 s"):
        stream = llama.generate(prompt, temp=0.0)
        found = [next(stream) for _ in range(n)]
        stream.close()
    return found
def status(name):
    return suite.status()["plugins"][name]
def talk(llama):
    return [ask(llama, i % 4) for i in range(8)]
"""
LIMITED = """
suite = activate({"on_error": "raise", "memory": {"budget": BUDGET}, "plugins": plugins()})
llama = Llama(path, **settings)
found = talk(llama)
remember(folder / "knn", [Message("user", QUESTION), Message("assistant", ANSWER)], title="new")
ended = time.monotonic() + 60
while not (learned := status("knn_lm")["learned"]) and time.monotonic() < ended:
    time.sleep(0.05)
found += talk(llama)
report = suite.status()
llama.close()
suite.deactivate()
print(json.dumps([found, learned, report, peak()]))
"""
CHANGED = """
import os, random, signal, threading
start, rng = resident_bytes(), random.Random(5)
table = plugins()
table["kv_chunks"]["disk_budget"] = 0
table["knn_lm"]["learn"] = False
suite = activate(
    {"on_error": "raise", "memory": {"budget": start + 120 * MIB}, "plugins": table}
)
llama = Llama(path, **settings | {"n_ubatch": 64})
expected = [ask(llama, i) for i in range(4)]
shared, problems, n_interrupted = suite.plugin("memory"), [], 0
def interrupt(after_s):
    time.sleep(after_s)
    os.kill(os.getpid(), signal.SIGINT)
for k in range(ROUNDS):
    before, wanted = shared._budget, start + (52 if k % 2 else 120) * MIB
    delay_s = rng.random() * rng.choice([0.001, 0.01, 0.05])
    thread = threading.Thread(target=interrupt, args=[delay_s])
    try:
        thread.start()
        shared.set_budget(wanted)
        thread.join()
    except KeyboardInterrupt:
        n_interrupted += 1
    thread.join()
    over = resident_bytes() - shared._budget
    is_same = ask(llama, k % 4) == expected[k % 4]
    if shared._budget not in (before, wanted) or over > 0 or not is_same:
        problems.append([k, shared._budget, before, wanted, over, is_same])
for n_more in (120, 52):
    shared.set_budget(start + n_more * MIB)
over, errors = resident_bytes() - start - 52 * MIB, suite.status()["errors"]
llama.close()
suite.deactivate()
print(json.dumps([n_interrupted, problems, over, errors]))
"""
FORKED = """
import os, signal
suite = activate(
    {"on_error": "raise", "memory": {"budget": resident_bytes() + 150 * MIB}, "plugins": plugins()}
)
llama = Llama(path, **settings | {"n_ubatch": 64})
expected, problems = [ask(llama, i) for i in range(4)], []
for k in range(ROUNDS):
    if k % 5 == 0:
        texts = f"Where is number {k}?", f"It is at the station, in house number {k}."
        said = [Message("user", texts[0]), Message("assistant", texts[1])]
        remember(folder / "knn", said, title=f"{k}")
        time.sleep(1.1)  # until the device is idle
    time.sleep(k % 7 * 0.01)
    if (pid := os.fork()) == 0:
        code = 1
        try:
            signal.alarm(30)
            code = 0 if ask(llama, k % 4) == expected[k % 4] else 2
        finally:
            os._exit(code)
    if code := os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):
        problems.append([k, code])
report = suite.status()
llama.close()
suite.deactivate()
print(json.dumps([problems, report["plugins"]["knn_lm"]["learned"], report["errors"]]))
"""
VANILLA = """
llama = Llama(path, **settings)
print(json.dumps(talk(llama) + talk(llama)))
"""


@pytest.fixture(scope="session")
def large(shared):
    """Return a prepared and packed model of 20 MB with a datastore."""

    def fill(folder):
        source = write_random_model(folder / "source.gguf", SHAPE, GGMLQuantizationType.Q8_0)
        path = prepare(source, folder / "model.gguf")
        pack(path)
        built(path, folder / "knn")

    return shared("together large", fill) / "model.gguf"


@pytest.mark.slow
def test_the_budget_is_never_exceeded_with_all_plugins(large):
    """The process lives in a cgroup of the budget's size, which would end it."""
    script = SCRIPT.replace("ENGINE", repr(ENGINE))
    expected = run(large, script + VANILLA)
    question, answer = CONVERSATIONS[0].messages
    limited = LIMITED.replace("QUESTION", repr(question.content)).replace(
        "ANSWER", repr(answer.content)
    )
    with memory_group() as group:
        group.limit(BUDGET)
        found, learned, report, peak = run(
            large, script + limited.replace("BUDGET", str(BUDGET)), group=group
        )
    assert found == expected
    assert learned == 1
    plugins = report["plugins"]
    assert peak <= plugins["memory"]["in_force"] < BUDGET
    assert plugins.keys() == {*SETTINGS, "memory"}
    assert report["errors"] == {}
    assert all(map(is_streamed, plugins["flash_weights"]["models"]))
    assert plugins["kv_chunks"]["restored_tokens"] > 0
    assert plugins["knn_lm"]["draft_bytes"] > 0
    assert plugins["knn_lm"]["learning_error"] is None


@pytest.mark.slow
@pytest.mark.soak
def test_ctrl_c_while_the_budget_changes(large):
    """The old budget or the new one is in force, it is kept, and texts stay the same."""
    n_rounds = scale(40, 1000)
    script = SCRIPT.replace("ENGINE", repr(ENGINE)) + CHANGED.replace("ROUNDS", str(n_rounds))
    n_interrupted, problems, over, errors = run(large, script)
    assert n_interrupted > n_rounds / 2
    assert (problems, errors) == ([], {})
    assert over <= 0


@pytest.mark.slow
@pytest.mark.soak
def test_children_answer_while_the_parent_learns(large, tmp_path):
    """The parent's learning thread computes with the weights that a child goes on with."""
    folder = shutil.copytree(large.parent, tmp_path / "own")
    script = SCRIPT.replace("ENGINE", repr(ENGINE))
    script += FORKED.replace("ROUNDS", str(scale(20, 400)))
    problems, n_learned, errors = run(folder / large.name, script)
    assert (problems, errors) == ([], {})
    assert n_learned > 0

"""``llmaas serve`` decodes calls of all plugins in one batch, each as it is alone."""

from __future__ import annotations

import contextlib
import functools
import shutil
import signal

import pytest
from batched import at_once, batches, one_by_one
from served import ENDLESS, serving
from together import PAIRS

pytest.importorskip("fastapi")

CONFIG = """
on_error = "raise"
[service]
state_dir = "state"
most_together = 4
[plugins.kv_chunks]
store = "kv"
codec = "{codec}"
parked_tokens = 256
[plugins.flash_weights]
arena = "1 MiB"
mode = "{mode}"
[plugins.elastic]
[plugins.knn_lm]
store = "pairs"
drafts = true
look_back = 8
[plugins.deadlines]
[memory]
budget = {budget}
"""
ENOUGH = 1 << 30
ROOM = 40 << 20
"""Bytes of the budget beyond the process, with which ``flash_weights`` serves the model."""
ASKED = {
    "mail": {"level": 1.0},
    "notes": {"level": 0.5},
    "game": {"level": 1.0, "slo": {"tpot": "60 s"}},
    "todo": {"level": {"prefill": 1.0, "decode": 0.5}, "slo": {"ttft": "3000 s"}},
}
"""Requests of each app: two levels, with promises and without."""
TURNS = ("Where does Bruno sleep?", "When is the boat?")
SHORT = {"temperature": 0.0, "max_tokens": 16}


@contextlib.contextmanager
def started(folder, model, codec="int8", mode="exact", budget=ENOUGH):
    if not (folder / PAIRS).exists():
        shutil.copytree(model.parent / PAIRS, folder / PAIRS)
    config = CONFIG.format(codec=codec, mode=mode, budget=budget)
    options = {"model": str(model), "environ": {"HOME": str(model.parent)}, "flash_attn": True}
    with serving(folder, config=config, **options) as server:
        yield server


@pytest.mark.parametrize(
    ("codec", "mode", "why"),
    [
        ("int8", "exact", None),
        ("tolerance", "exact", None),
        ("lossless", "exact", "lossless"),
        ("tolerance", "sparse", "flash_weights can serve one call at a time only"),
    ],
)
def test_it_says_why_calls_run_alone(model, tmp_path, codec, mode, why):
    with started(tmp_path, model, codec, mode) as server:
        asks = [
            lambda a=app: server.client.bind(a).new_context().call("Hi", **SHORT) for app in ASKED
        ]
        at_once(*asks)
        found = server.status()["together"]
        if why is None:
            assert found["why_alone"] is None
            assert found["batches"] > 0
        else:
            assert why in found["why_alone"]
            assert found["batches"] == 0


def asks(server, contexts, turn):
    """Return functions that call each app's context."""

    def ask(app):
        context = server.client.bind(app).context(contexts[app])
        return context.call(turn, **SHORT, **ASKED[app])["text"]

    return [functools.partial(ask, app) for app in ASKED]


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["int8", "tolerance"])
@pytest.mark.parametrize("is_served", [False, True], ids=["in memory", "flash_weights"])
def test_apps_answer_as_one_by_one(model, tmp_path, codec, is_served):
    """Also where a client leaves meanwhile, and after the server was killed."""
    said, n = {}, 0
    for how in (one_by_one, lambda _, found: at_once(*found)):
        folder = tmp_path / str(n)
        folder.mkdir()
        budget, n = ENOUGH, n + 1
        with started(folder, model, codec) as server:
            if is_served:
                budget = server.status()["memory"]["resident_bytes"] + ROOM
        with started(folder, model, codec, budget=budget) as server:
            contexts = {app: server.client.bind(app).new_context().id for app in ASKED}
            first = how(server, asks(server, contexts, TURNS[0]))
            assert bool(server.status()["plugins"]["flash_weights"]["models"]) == is_served
            leaving = server.client.bind("mail").new_context().stream("Hello", **ENDLESS)
            next(leaving)
            leaving.close()
            assert server.status()["errors"] == {}
            assert server.status()["plugins"]["knn_lm"]["unmatched"] == 0
            assert (batches(server)[0] > 0) == (n == 2)
            server.stop(signal.SIGKILL)
        with started(folder, model, codec, budget=budget) as server:
            again = how(server, asks(server, contexts, TURNS[1]))
            assert server.kv()["restored_tokens"] > 0
            assert server.status()["errors"] == {}
            assert server.stop() == 0
            assert "Traceback" not in server.log()
        assert all(again)
        said[n] = first
    assert said[2] == said[1]
    assert len(set(said[1])) > 1

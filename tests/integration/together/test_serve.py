"""``llmaas serve`` with all plugins and two apps with keys, killed in the middle of an answer."""

from __future__ import annotations

import contextlib
import shutil
import signal
import threading

import pytest
from datastores import CONVERSATIONS
from limited import ADMINISTRATOR, MAIL, NOTES, ask
from served import ENDLESS, ENGINE, serving, wait_until
from together import PAIRS

from llmaas_plugins.config import ServiceConfig
from llmaas_plugins.knn_lm.archive.archive import Archive
from llmaas_plugins.knn_lm.build.inbox import remember, waiting_files
from llmaas_plugins.server.client import LLMClient
from llmaas_plugins.service.service import LLMService

pytest.importorskip("fastapi")

CONFIG = """
on_error = "raise"
[service]
state_dir = "state"
key_file = "keys.toml"
max_context_tokens = 400
[memory]
budget = {budget}
[plugins.kv_chunks]
store = "kv"
codec = "lossless"
recompute = false
parked_tokens = 256
[plugins.flash_weights]
arena = "1 MiB"
[plugins.elastic]
[plugins.knn_lm]
store = "pairs"
alpha = 0.0
drafts = true
learn = true
idle_s = 0.01
[plugins.deadlines]
"""
KEYS = {"mail": MAIL, "notes": NOTES}
SECRETS = {"mail": "The word of the day is heliotrope.", "notes": "The word is marzipan."}
TURNS = ("Where does Bruno sleep?", "When is the boat?", "Where does Bruno sleep?")
"""Logits of the last answer's tokens are 0.2 apart, so that drafts do not decide between two."""
N_BEFORE = 2
"""Turns before the server is killed."""
ASKED = {
    "mail": {"slo": {"ttft": "3000 s", "tpot": "60 s"}, "level": 1.0},
    "notes": {},
}
ROOM = 40 << 20
"""Bytes of the budget beyond the process: weights are streamed, and there is room to learn."""
SHORT = {"temperature": 0.0, "max_tokens": 8}
OWNERS = {"weights kept in memory", "streaming buffers", "contexts in RAM"}
OWNERS |= {"datastore", "drafts", "cells of contexts", "the rest"}


@pytest.fixture(scope="module")
def expected(model, tmp_path_factory):
    """Return each app's replies in a service without plugins."""
    config = ServiceConfig(state_dir=tmp_path_factory.mktemp("vanilla"))
    with contextlib.closing(LLMService.open(model, config, **ENGINE)) as service:
        contexts = {app: service.bind(app).new_context(said) for app, said in SECRETS.items()}
        return {
            app: [context.call(turn, **SHORT).text for turn in TURNS]
            for app, context in contexts.items()
        }


@contextlib.contextmanager
def started(folder, model, budget):
    """Start a server in a folder; yield it, and the view of each app."""
    config = CONFIG.format(budget=budget)
    options = {"key": ADMINISTRATOR, "model": str(model), "environ": {"HOME": str(model.parent)}}
    with serving(folder, "--api_key", ADMINISTRATOR, config=config, **options) as server:
        clients = {app: LLMClient(server.address, api_key=KEYS[app]) for app in KEYS}
        yield server, {app: client.bind(app) for app, client in clients.items()}


def at_once(work):
    """Do the work of all apps at the same time; return their results."""
    found = {}
    threads = [
        threading.Thread(target=lambda app=app: found.update({app: work(app)})) for app in KEYS
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.slow
def test_apps_go_on_after_a_kill(model, expected, tmp_path):
    store = shutil.copytree(model.parent / PAIRS, tmp_path / "pairs")
    (tmp_path / "keys.toml").write_text("".join(f'{app} = "{KEYS[app]}"\n' for app in KEYS))
    (tmp_path / "keys.toml").chmod(0o600)
    with started(tmp_path, model, 1 << 30) as (server, apps):
        contexts = {app: apps[app].new_context(SECRETS[app]) for app in KEYS}

        def talk(app):
            said = [contexts[app].call(turn, **SHORT, **ASKED[app]) for turn in TURNS[:N_BEFORE]]
            return [reply["text"] for reply in said]

        assert at_once(talk) == {app: expected[app][:N_BEFORE] for app in KEYS}
        status = server.status()
        assert status["errors"] == {}
        assert status["plugins"]["deadlines"]["requests"]["promised"] == N_BEFORE
        server.wait_until_idle()
        for app in KEYS:
            learn(store, app)
        stream = contexts["mail"].stream("Tell me a long story.", **ENDLESS | {"max_tokens": 200})
        next(stream)
        server.stop(signal.SIGKILL)
        stream.close()
    with started(tmp_path, model, status["memory"]["resident_bytes"] + ROOM) as running:
        server, apps = running
        contexts = {app: apps[app].context(contexts[app].id) for app in KEYS}
        check_apart(server, contexts)

        def go_on(app):
            return contexts[app].call(TURNS[N_BEFORE], **SHORT, **ASKED[app])["text"]

        assert at_once(go_on) == {app: expected[app][N_BEFORE] for app in KEYS}
        wait_until(lambda: waiting_files(store) == [])
        check_status(server)
        assert server.stop() == 0
        assert "Traceback" not in server.log()
    check_learned(store)


def learn(store, app):
    messages = CONVERSATIONS[0].messages
    remember(store, messages, title=f"of {app}", app=app)


def check_apart(server, contexts):
    """Check that each app finds its own contexts only, and no memory but their bytes."""
    for app, key in KEYS.items():
        (other,) = KEYS.keys() - {app}
        where = f"/v1/llmaas/apps/{other}/contexts"
        assert ask(server, "GET", where, key=key)[0] == 403
        assert ask(server, "GET", f"{where}/{contexts[other].id}", key=key)[0] == 403
        assert ask(server, "GET", "/v1/llmaas/status", key=key)[0] == 403
        _, _, found = ask(server, "GET", "/v1/llmaas/contexts", key=key)
        assert [one["id"] for one in found["contexts"]] == [contexts[app].id]
        assert found["contexts"][0]["bytes"]["disk"] > 0
        assert "memory" not in found
        said = [message["content"] for message in contexts[app].record()["messages"]]
        assert said[0] == SECRETS[app]
        assert said[1::2] == list(TURNS[:N_BEFORE])


def owners(memory):
    return {one["owner"] for one in memory["owners"]}


def check_status(server):
    def seen():
        """Return the status, and both descriptions of memory, unless it just moves to learning."""
        status = server.status()
        _, _, found = ask(server, "GET", "/v1/llmaas/contexts", key=ADMINISTRATOR)
        memories = status["memory"], found["memory"]
        return all(owners(one) >= OWNERS for one in memories) and (status, memories)

    status, memories = wait_until(seen)
    plugins = status["plugins"]
    assert status["errors"] == {}
    assert plugins["kv_chunks"]["restored_tokens"] > 0
    assert plugins["flash_weights"]["mode"] == "exact"
    assert plugins["knn_lm"]["learning_error"] is None
    for memory in memories:
        total = sum(one["bytes"] for one in memory["owners"])
        assert total == memory["resident_bytes"] <= memory["budget"]


def check_learned(store):
    """Check that each conversation was learned once, whenever the server was killed."""
    with Archive.open(store) as archive:
        titles = [one.title for one in archive.conversations()]
    assert sorted(title for title in titles if title.startswith("of ")) == ["of mail", "of notes"]

"""SIGKILL at random moments: no acknowledged call is lost, and no stored cell is wrong."""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
import threading

import pytest
from conversations import (
    APPS,
    ENGINE,
    GREEDY,
    PROMPTS,
    SUPPORT,
    follows,
    system_prompt,
    vanilla,
)
from soak import scale

from llmaas_plugins.kv_chunks.checking import check_store

# Kills under each setting. Replies are stock llama.cpp's if the setting keeps all bits of cells.
# `make soak` has two thousand kills in ten parts.
PARTS = range(scale(1, 10))
SETTINGS = {
    "lossless": (scale(5, 80), {"codec": "lossless", "ram_budget": "1 MiB"}),
    "tolerance, shared": (
        scale(3, 60),
        {"codec": "tolerance", "ram_budget": "1 MiB", "share_across_apps": True},
    ),
    "int8, parked": (
        scale(3, 60),
        {
            "codec": "int8",
            "ram_budget": "3 MiB",
            "parked_tokens": 512,
            "recompute": False,
            "write_budget": "99 MiB",
        },
    ),
}

# Serves its contexts in turn, each until all prompts were answered; then deletes the context and
# begins anew. Writes a line for each complete operation. Budgets are so small that both tiers evict
# all the time.
CHILD = """
import itertools, json, sys
from conversations import digest, system_prompt
from llama_cpp import Llama
from llmaas_plugins import activate
from llmaas_plugins.service import LLMService, ServiceConfig

job = json.loads(sys.argv[1])

def say(**line):
    print(json.dumps(line), flush=True)

say(op="start")
kv = {"disk_budget": "1200 KiB", "store": job["folder"] + "/kv"} | job["settings"]
config = ServiceConfig(state_dir=job["folder"] + "/state", max_contexts_per_app=1)
with activate({"on_error": "raise", "plugins": {"kv_chunks": kv}}) as suite:
    llama = Llama(job["model"], **job["engine"])
    with LLMService(llama, config) as service:
        apps = [service.bind(name) for name in job["apps"]]
        for app in apps:
            for context in app.contexts():
                say(op="found", app=app.name, id=context.id, messages=context.record().messages)
        say(op="ready", status=suite.status()["plugins"]["kv_chunks"])
        n_done = 0
        for app in itertools.cycle(apps):
            if n_done >= job["n_operations"]:
                break
            n_done += 1
            for context in app.contexts():
                break
            else:
                context = app.new_context(system_prompt(app.name))
                say(op="new", app=app.name, id=context.id)
            record = context.record()
            if record.n_calls == len(job["prompts"]):
                context.delete()
                say(op="delete", app=app.name, id=context.id)
                continue
            reply = context.call(job["prompts"][record.n_calls], **job["sampling"])
            cells = digest(llama) if n_done % 2 else None
            say(op="call", app=app.name, id=context.id, n=record.n_calls, text=reply.text,
                cells=cells)
        say(op="done", status=suite.status()["plugins"]["kv_chunks"])
    llama.close()
"""


@pytest.fixture(scope="module")
def expected(reference_model):
    """Return stock llama.cpp's messages after each call, and a digest of the cells, by app."""
    return {app: vanilla(reference_model, app) for app in APPS}


@pytest.fixture
def live(tmp_path, reference_model):
    """Run the child to its end, or kill it some time after its n-th line; return its lines."""
    children = []

    def live(settings, kill_at=None, kill_after_s=0.0, n_operations=10**9):
        job = {
            "folder": str(tmp_path), "model": str(reference_model), "engine": ENGINE,
            "apps": APPS, "prompts": PROMPTS, "sampling": GREEDY, "n_operations": n_operations,
            "settings": settings,
        }  # fmt: skip
        errors = tmp_path / "stderr"
        with (
            errors.open("wb") as stderr,
            subprocess.Popen(
                [sys.executable, "-c", CHILD, json.dumps(job)],
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=os.environ | {"PYTHONPATH": SUPPORT},
            ) as child,
        ):
            children.append(child)
            killer = None
            lines = []
            for line in child.stdout:
                lines.append(json.loads(line))
                if len(lines) == kill_at:
                    killer = threading.Timer(kill_after_s, child.kill)
                    killer.start()
            if killer is not None:
                killer.join()
        assert errors.read_text() == ""  # above all: nothing unusable, no damaged chunk
        assert child.returncode == (0 if kill_at is None else -9)
        return lines

    yield live
    for child in children:
        child.kill()
        child.wait()


class Ledger:
    """Contexts that must be there according to the acknowledgments.

    Args:
        expected: Each app's messages and cells after each call; None if they cannot be known.
    """

    def __init__(self, expected):
        self.expected = expected
        self.messages = {}  # messages of each app's context, if it has one
        self.n_acknowledged = 0

    def read(self, lines):
        found = {line["app"]: line["messages"] for line in lines if line["op"] == "found"}
        for line in lines:
            app = line.get("app")
            if line["op"] == "ready":
                self.compare(found)
                # no cells of deleted contexts are left
                assert line["status"]["contexts"] <= len(found)
            elif line["op"] == "new":
                assert app not in self.messages
                self.messages[app] = [{"role": "system", "content": system_prompt(app)}]
            elif line["op"] == "delete":
                assert follows(self.messages.pop(app), None, app)
            elif line["op"] == "call":
                self.called(line)

    def called(self, line):
        app, n = line["app"], line["n"]
        assert len(self.messages[app]) == 1 + 2 * n
        self.messages[app] += [
            {"role": "user", "content": PROMPTS[n]},
            {"role": "assistant", "content": line["text"]},
        ]
        self.check(app, line["cells"])
        self.n_acknowledged += 1

    def compare(self, found):
        """Accept one more complete operation, because the kill may have come before its line."""
        ahead = 0
        for app in APPS:
            known, there = self.messages.get(app), found.get(app)
            if there != known:
                assert follows(known, there, app)
                ahead += 1
        assert ahead <= 1
        self.messages = found
        for app in found:
            self.check(app)

    def check(self, app, cells=None):
        """Compare an app's messages and cells with stock llama.cpp's."""
        if self.expected is not None:
            messages, digest = self.expected[app][len(self.messages[app]) // 2]
            assert self.messages[app] == messages
            assert cells in {None, digest}


@pytest.mark.soak
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize(("kills", "settings"), SETTINGS.values(), ids=SETTINGS)
def test_no_acknowledged_call_is_lost(live, tmp_path, expected, kills, settings, part):  # noqa: PLR0917
    rng = random.Random(1000 * part + kills)
    ledger = Ledger(expected if settings["codec"] == "lossless" else None)
    restored, parked = 0, 0
    for _ in range(kills):
        ledger.read(live(settings, rng.randint(1, 16), rng.uniform(0.0, 0.15)))
    for n_operations in (3 * len(APPS), len(APPS)):
        lines = live(settings, n_operations=n_operations)
        ledger.read(lines)
        status = lines[-1]["status"]
        restored += status["restored_tokens"]
        parked += status.get("parks", 0)
        assert status["faults"] == status["io_errors"] == 0
    assert ledger.n_acknowledged >= kills
    assert restored > 0
    assert (parked > 0) == ("parked_tokens" in settings)
    assert check_store(tmp_path / "kv").problems == []


def test_the_reference_tells_calls_apart(expected):
    for app in APPS:
        cells = [cells for _, cells in expected[app]]
        assert len(set(cells)) == len(cells)
    for one, other in itertools.combinations(APPS, 2):
        assert expected[one] != expected[other]

"""SIGKILL at random moments: no acknowledged call is lost, and no stored cell is wrong."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import fork_server
import pytest
from conversations import (
    APPS,
    PROMPTS,
    SUPPORT,
    follows,
    system_prompt,
    vanilla,
)
from soak import scale

from llmaas_plugins.kv_chunks.maintenance.checking import check_store

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

FOLDER = str(Path(__file__).parent)


@pytest.fixture(scope="module")
def expected(reference_model):
    """Return stock llama.cpp's messages after each call, and a digest of the cells, by app."""
    return {app: vanilla(reference_model, app) for app in APPS}


@pytest.fixture
def live(tmp_path, reference_model):
    """Run a life to its end, or kill it some time after its n-th line; return its lines."""
    errors = tmp_path / "stderr"
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([FOLDER, SUPPORT])}

    def live(settings, kill_at=None, kill_after_s=0.0, n_operations=10**9):
        job = {
            "folder": str(tmp_path), "model": str(reference_model),
            "n_operations": n_operations, "settings": settings,
        }  # fmt: skip
        command = [sys.executable, "-m", "kills_driver", json.dumps(job)]
        lines = []
        with (
            errors.open("wb") as stderr,
            fork_server.Process(
                command, stdout=subprocess.PIPE, stderr=stderr, env=environ
            ) as process,
        ):
            for line in map(json.loads, process.stdout):
                lines.append(line)
                if len(lines) == kill_at:
                    time.sleep(kill_after_s)
                    process.kill()
        assert errors.read_text() == ""  # above all: nothing unusable, no damaged chunk
        assert process.returncode == (0 if kill_at is None else -signal.SIGKILL)
        return lines

    return live


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


@pytest.mark.slow
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

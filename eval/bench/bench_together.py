"""Four contexts of ``llmaas serve``, decoded in one batch and one after another.

With levels of ``elastic``, those of equal level share a batch. Both sides are calls to the same
service; each call goes on with a context of 400 tokens that is stored. The times are those of the
clients, with everything that a call takes.
"""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import threading
import time
import urllib.request

import numpy as np
import pytest

from llmaas_eval.paired import compare, repeats
from llmaas_plugins.server.client import LLMClient

N_CONTEXTS, N_PROMPT, N_TOKENS, N_ROUNDS = 4, 400, 48, 10
BUDGETS = {"memory": None, "streamed": 490 << 20}
"""Budgets for ``flash_weights``; with the second one, about half of the weights stay in memory."""
LEVELS = {"one": (0.5,) * N_CONTEXTS, "two": (1.0, 1.0, 0.5, 0.5)}
"""Levels of the calls: all equal, or two of each."""
SETTINGS = {"n_ctx": 512, "n_batch": 128, "n_ubatch": 128}
CONFIG = """
on_error = "raise"
[service]
state_dir = "state"
most_together = {most}
[plugins.kv_chunks]
store = "kv"
ram_budget = "64 MiB"
"""
_START_S = 300.0


class Service:
    """A running service, and four prompts to it."""

    def __init__(self, address, levels=()):
        """Attach to the service, whose calls ask for these levels."""
        self._levels = levels
        self._address, self._client = address, LLMClient(address, timeout_s=600)
        letters = np.random.default_rng(0).integers(97, 123, (N_CONTEXTS, N_PROMPT))
        self._prompts = ["".join(map(chr, row)) for row in letters]
        self.n_tokens = 2 * repeats(N_TOKENS // 2)

    def status(self):
        """Return the service's status."""
        return self._client.status()

    def answer(self, i):
        """Let the service answer a prompt; no answer ends early."""
        body = {
            "prompt": self._prompts[i],
            "max_tokens": self.n_tokens,
            "temperature": 0.0,
            "repeat_penalty": 0.5,  # rewards repetition, so that the end never wins
        }
        if self._levels:
            body["level"] = self._levels[i]
        request = urllib.request.Request(
            f"{self._address}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=600) as answer:
            found = json.loads(answer.read())
        assert found["usage"]["completion_tokens"] == self.n_tokens

    def one_by_one(self):
        """Answer all prompts, one after another."""
        for i in range(N_CONTEXTS):
            self.answer(i)

    def together(self):
        """Answer all prompts at the same time."""
        threads = [threading.Thread(target=self.answer, args=(i,)) for i in range(N_CONTEXTS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


@contextlib.contextmanager
def serving(model, folder, flash=None, levels=()):
    """Run a service in a folder, with these bytes for ``flash_weights``' budget, or with levels."""
    folder.mkdir()
    table = "" if flash is None else f"[plugins.flash_weights]\nmemory_budget = {flash}\n"
    table += "[plugins.elastic]\n" if levels else ""
    (folder / "llmaas.toml").write_text(CONFIG.format(most=N_CONTEXTS) + table)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    command = [sys.executable, "-m", "llmaas_plugins.cli.main", "serve", "--config", "llmaas.toml"]
    options = {"model": model, "port": port} | SETTINGS
    command += [part for name, value in options.items() for part in (f"--{name}", str(value))]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)
    try:
        service = Service(f"http://127.0.0.1:{port}", levels)
        deadline = time.monotonic() + _START_S
        while True:
            with contextlib.suppress(OSError):
                service.status()
                break
            assert process.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        yield service
    finally:
        process.terminate()
        process.wait(60)


@pytest.mark.parametrize("weights", BUDGETS)
def bench_four_contexts(model_1b, benchmark, weights, tmp_path):
    """Answer four prompts together, and one after another."""
    flash = BUDGETS[weights]
    with serving(model_1b, tmp_path / "service", flash) as service:
        compare(benchmark, service.together, service.one_by_one, rounds=N_ROUNDS)
        status = service.status()
    found = status["together"]
    n_tokens = N_CONTEXTS * service.n_tokens
    benchmark.extra_info |= {"n_tokens": n_tokens, "a_batch": found["tokens"] / found["batches"]}
    if flash is not None:
        (streamed,) = status["plugins"]["flash_weights"]["models"]
        benchmark.extra_info["kept"] = streamed["kept_bytes"] / streamed["bytes"]


@pytest.mark.parametrize("levels", LEVELS)
def bench_levels(model_1b_elastic, benchmark, levels, tmp_path):
    """Answer four prompts at one or two levels, together and one after another."""
    with serving(model_1b_elastic, tmp_path / "service", levels=LEVELS[levels]) as service:
        compare(benchmark, service.together, service.one_by_one, rounds=N_ROUNDS)
        found = service.status()["together"]
    n_tokens = N_CONTEXTS * service.n_tokens
    benchmark.extra_info |= {"n_tokens": n_tokens, "a_batch": found["tokens"] / found["batches"]}

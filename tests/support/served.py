"""``llmaas serve`` in a process that the test owns."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import time
import urllib.request
from pathlib import Path

import fork_server

from llmaas_plugins.server.client import LLMClient

LLMAAS = [sys.executable, "-m", "llmaas_plugins.cli.main"]
# Evaluate one token at a time: texts must not depend on which tokens were restored.
ENGINE = {"n_ctx": 512, "n_ubatch": 1, "n_threads": 1, "n_threads_batch": 1}
LONG_N_CTX = 2048
# Reward repetition, so that the end token never wins: a reply takes seconds unless ended early.
ENDLESS = {"temperature": 0.0, "repeat_penalty": 0.5, "max_tokens": LONG_N_CTX - 100}
CONFIG = """
on_error = "raise"
[service]
state_dir = "state"
{service}
[plugins.kv_chunks]
codec = "{codec}"
store = "kv"
{kv}
"""


class Served:
    """A running server."""

    def __init__(self, process, address, folder, key):
        self.process = process
        self.address = address
        self.folder = folder
        self.client = LLMClient(address, api_key=key, timeout_s=120)

    @property
    def port(self):
        return int(self.address.rpartition(":")[2])

    def log(self):
        return (self.folder / "log").read_text()

    def status(self):
        return self.client.status()

    def kv(self):
        """Return the status that kv_chunks reports."""
        return self.status()["plugins"]["kv_chunks"]

    def metrics(self, key=None):
        """Return the values of /metrics, keyed by name and labels as printed."""
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        request = urllib.request.Request(f"{self.address}/metrics", headers=headers)
        with urllib.request.urlopen(request, timeout=60) as response:
            lines = response.read().decode().splitlines()
        pairs = (line.rpartition(" ") for line in lines if not line.startswith("#"))
        return {name: float(value) for name, _, value in pairs}

    def rss(self):
        """Return the resident bytes."""
        return _proc_status(self.process.pid, "VmRSS") * 1024

    def n_threads(self):
        return _proc_status(self.process.pid, "Threads")

    def n_files(self):
        """Return the number of open files and sockets."""
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))

    def wait_until_idle(self):
        wait_until(lambda: self.status()["queue"] == 0)

    def stop(self, how=signal.SIGTERM, seconds=60):
        """Send a signal, wait for the server's end and return its exit code."""
        self.process.send_signal(how)
        return self.process.wait(seconds)


def _proc_status(pid, name):
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def wait_until(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


def engine_options(**engine):
    return [item for name, value in (ENGINE | engine).items() for item in (f"--{name}", str(value))]


@contextlib.contextmanager
def launched(folder, *options, config, environ=None, start=fork_server.Process, **engine):
    """Start the process; yield it at once and kill it at the end if it still runs.

    With ``start=subprocess.Popen`` it is not forked but an interpreter of its own.
    """
    (folder / "llmaas.toml").write_text(config)
    command = [*LLMAAS, "-v", "serve", "--config", "llmaas.toml", *engine_options(**engine)]
    command += () if "--model" in options or "model" in engine else ("--toy",)
    with (
        (folder / "log").open("ab") as log,
        start(
            [*command, *options],
            cwd=folder,
            env=os.environ | {"PYTHONUNBUFFERED": "1"} | (environ or {}),  # tests read its log
            stdout=log,
            stderr=log,
        ) as process,
    ):
        try:
            yield process
        finally:
            process.kill()


@contextlib.contextmanager
def serving(
    folder, *options, uds=None, key=None, config=None, service="", kv="", codec="lossless", **more
):
    """Start a server in ``folder`` on a free port or a Unix socket; yield it once it is ready.

    Args:
        folder: Folder for configuration, state, store and log.
        *options: Command-line options.
        uds: Path of the socket.
        key: API key to use.
        config: The whole configuration; replaces ``service`` and ``kv``.
        service: Lines of ``[service]``.
        kv: Lines of ``[plugins.kv_chunks]``.
        codec: Value of ``codec`` for kv_chunks.
        **more: Further arguments of ``launched``.
    """
    if uds is None:
        port = free_port()
        address, where = f"http://127.0.0.1:{port}", ("--port", str(port))
    else:
        address, where = f"unix:{uds}", ("--uds", str(uds))
    config = CONFIG.format(service=service, codec=codec, kv=kv) if config is None else config
    with launched(folder, *where, *options, config=config, **more) as process:
        served = Served(process, address, folder, key)

        def is_up():
            assert process.poll() is None, served.log()
            with contextlib.suppress(OSError):
                return served.client.status()

        wait_until(is_up)
        yield served


def completion(server, body):
    """Return an open answer to a completion."""
    request = urllib.request.Request(
        f"{server.address}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    return urllib.request.urlopen(request, timeout=120)


def completion_text(server, body):
    with completion(server, body) as answer:
        return json.loads(answer.read())["choices"][0]["text"]


def drain(stream):
    """Return the pieces of a stream and its reply."""
    pieces = []
    while True:
        try:
            pieces.append(next(stream))
        except StopIteration as end:
            return pieces, end.value

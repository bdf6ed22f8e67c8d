"""A running ``llmaas serve``, which the study asks over HTTP as an app would."""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from llmaas_eval.deadlines.loaded.recorder import Record, install, read_records
from llmaas_eval.deadlines.loaded.systems import Kind, System, config_text
from llmaas_eval.deadlines.loaded.traces import APP_NAMES

__all__ = ["KEYS", "N_CTX", "Service", "serving"]

N_CTX = 1024
KEYS: Mapping[str, str] = {app: f"{app.lower()}-0123456789abcdef" for app in APP_NAMES}
"""Key of each app, so that plugins know whose request it is."""
_START_S, _STOP_S = 300.0, 30.0
_MOST_LOG = 2000


class Service:
    """A server that the study started.

    Attributes:
        port: Port on 127.0.0.1.
    """

    def __init__(self, process: subprocess.Popen[bytes], port: int, folder: Path) -> None:
        """Take a process that was started in a folder."""
        self._process = process
        self.port = port
        self._folder = folder

    def records(self) -> dict[str, Record]:
        """Return the records of all requests that ended, by the key of their prompt."""
        return read_records(self._folder / "requests.jsonl")

    def settle(self) -> None:
        """Wait a second for the server's work in the background."""
        time.sleep(1.0)

    def stop(self) -> None:
        """End the process, whatever it does; requests that wait get no answer."""
        self._process.kill()
        self._process.wait(_STOP_S)

    def wait(self) -> None:
        """Wait until the server answers.

        Raises:
            RuntimeError: It ended, or did not answer in time. The message has the log's end.
        """
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                break
            with contextlib.suppress(OSError, http.client.HTTPException):
                connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=_START_S)
                with contextlib.closing(connection):
                    connection.request("GET", "/health")
                    if connection.getresponse().status == http.HTTPStatus.OK:
                        return
            time.sleep(0.1)
        log = (self._folder / "log").read_text("utf-8", "replace")[-_MOST_LOG:]
        raise RuntimeError(f"`llmaas serve` does not answer: {log}")


@contextlib.contextmanager
def serving(system: System, kind: Kind, model: Path, folder: Path) -> Iterator[Service]:
    """Start a service of a system; stop it at the end.

    Args:
        system: System.
        kind: Kind of prompts.
        model: Prepared model.
        folder: Empty folder for the service's files.

    Raises:
        RuntimeError: The service does not start.
    """
    install(folder / "plugins")
    config = folder / "llmaas.toml"
    config.write_text(config_text(system, kind, KEYS, folder), encoding="utf-8")
    port = _free_port()
    options = {"config": config, "model": model.absolute(), "port": port, "n_ctx": N_CTX}
    command = [sys.executable, "-m", "llmaas_plugins.cli.main", "serve"]
    command += [part for name, value in options.items() for part in (f"--{name}", str(value))]
    paths = [str(folder / "plugins"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, env=environ, stdout=log, stderr=log)  # noqa: S603  our own command
    service = Service(process, port, folder)
    try:
        service.wait()
        yield service
    finally:
        service.stop()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port

"""Commands whose steps and workers are forked (``fork_server``) instead of started anew.

``llmaas setup``, ``tune`` and ``demo`` start up to twenty processes each, which import llama_cpp,
numpy and the suite. Tests of what such a command makes or finds need no new interpreters for that;
those of how it is stopped have them.
"""

from __future__ import annotations

import base64
import contextlib
import os
import pickle
import subprocess
import sys
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace

import fork_server

SUPPORT = str(Path(__file__).parent)
SECONDS = 600


def fork_children(patch):
    """Let the commands that this process runs fork their children, as long as ``patch`` holds."""
    from llmaas_plugins import worker_process
    from llmaas_plugins.cli.setup import processes

    run = SimpleNamespace(**vars(subprocess) | {"run": _run})
    patch.setattr(processes, "subprocess", run)
    context = SimpleNamespace(Pipe=Pipe, Process=_Worker)
    patch.setattr(worker_process, "multiprocessing", SimpleNamespace(get_context=lambda _: context))


def _run(command, **options):
    return fork_server.run(command, timeout=SECONDS, **options)


class _Worker:
    """A process of ``multiprocessing`` whose last argument is its end of a pipe."""

    def __init__(self, *, target, args, daemon):
        assert daemon
        *self._call, self._pipe = (target, *args)
        self._process = None

    def start(self):
        call = base64.b64encode(pickle.dumps(self._call)).decode()
        self._process = fork_server.Process(
            [sys.executable, "-c", "import forked_commands; forked_commands.main()", call],
            stdin=self._pipe.fileno(),
            env=os.environ | {"PYTHONPATH": SUPPORT},
        )

    def join(self, timeout=None):
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout)

    def kill(self):
        self._process.kill()


def main():
    """Do what the argument says, with the pipe that standard input is."""
    target, *args = pickle.loads(base64.b64decode(sys.argv[1]))
    target(*args, Connection(os.dup(0)))

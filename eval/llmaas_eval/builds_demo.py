"""Run the demo's trace with two builds of the suite, call by call in turn.

The workers of both builds are the demo's own (``llmaas_plugins.demo.worker``), each in its build's
Python. Builds whose demo has other messages cannot be compared.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

from tqdm import tqdm

from llmaas_plugins.demo.run import OURS, DemoOptions, ram_budget, worker_spec
from llmaas_plugins.demo.scenario import make_trace, scripts_from
from llmaas_plugins.demo.worker import CallResult, WorkerSpec
from llmaas_plugins.reference_model import reference_model_path

__all__ = ["Pair", "demo_pairs"]

Pair = tuple[float, float]

_WORKER = """
import sys
from multiprocessing.connection import Client
from llmaas_plugins.demo.worker import serve_worker
pipe = Client(sys.argv[1])
serve_worker(pipe.recv(), pipe)
"""


def demo_pairs(before: Path, after: Path, seed: int) -> dict[str, list[Pair]]:
    """Make each call of the demo's trace with both builds.

    Args:
        before: Checkout of the older build.
        after: Checkout of the newer build.
        seed: Random seed of the trace; it also decides which build makes the first call.

    Returns:
        Seconds of each call with both builds, by figure; seconds a token for ``decode``.
    """
    options = DemoOptions(reference_model_path(), seed=seed)
    scripts = scripts_from(options.data, options.n_contexts)
    pairs: dict[str, list[Pair]] = defaultdict(list)
    with ExitStack() as stack:
        workers = []
        for build in (before, after):
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/var/tmp")))
            spec = worker_spec(OURS, options, scripts, folder, ram_budget(options, scripts))
            workers.append(stack.enter_context(_worker(build, spec, folder)))
        for i, call in enumerate(tqdm(make_trace(scripts, None, seed), unit="call", disable=None)):
            results: list[Any] = [None, None]
            for which in (0, 1) if (i + seed) % 2 else (1, 0):
                workers[which].send((call.context, call.turn))
                results[which] = workers[which].recv()
            if all(isinstance(result, CallResult) for result in results):
                old, new = (_figures(result) for result in results)
                for figure in old.keys() & new.keys():
                    if old[figure] > 0 and new[figure] > 0:  # the first call leaves no context
                        pairs[figure].append((old[figure], new[figure]))
    return pairs


@contextmanager
def _worker(build: Path, spec: WorkerSpec, folder: Path) -> Iterator[Connection]:
    """Start a build's worker and yield the connection to it when it is ready."""
    address = str(folder / "worker")
    with Listener(address) as listener:
        process = subprocess.Popen(  # noqa: S603  the Python of a build named by the user
            [build / ".venv" / "bin" / "python", "-c", _WORKER, address],
            cwd=folder,
            env=os.environ | {"GGML_NO_BACKTRACE": "1"},
        )
        try:
            with listener.accept() as pipe:
                pipe.send(spec)
                if (answer := pipe.recv()) != "ready":
                    raise SystemExit(f"the demo of {build} cannot run: {answer}")
                yield pipe
        finally:
            process.kill()
            process.wait()


def _figures(result: CallResult) -> dict[str, float]:
    """Return the seconds of one call; a call that switched no context has no ``switch``."""
    figures = {
        "first token": result.first_token_s,
        "decode a token": result.decode_s / max(result.n_decoded, 1),
        "leave": result.leave_s,
        "behind": result.background_s,
    }
    if result.switch_s is None or result.enter_s is None:
        return figures
    return figures | {"switch": result.switch_s, "enter": result.enter_s}

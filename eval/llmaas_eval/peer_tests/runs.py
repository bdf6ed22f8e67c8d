"""Runs of the tests in each mode, and their results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmaas_hooks import LlmaasError

__all__ = ["MODES", "PLUGIN", "VANILLA", "Outcome", "Run", "read_record", "run_tests"]

VANILLA = "vanilla"
PLUGIN = "kv_chunks"
MODES: Mapping[str, str | None] = {
    VANILLA: None,
    "vanilla again": None,
    "nothing enabled": "",
    PLUGIN: PLUGIN,
    f"{PLUGIN} reopened": PLUGIN,
}
"""Plugins enabled in each mode, or None for a process without the suite.

Vanilla runs twice, to find results that differ between equal runs and so cannot be compared. The
last mode opens the store that the mode before it wrote.
"""
_CONFIG = """\
on_error = "raise"
[plugins.kv_chunks]
codec = "lossless"
store = "kv"
"""
_TIMEOUT_S = 600


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of one test.

    Attributes:
        outcome: pytest's outcome; ``crashed`` if the process died in the test, ``not imported`` for
            a file that could not be imported.
        message: Reason why the test failed or was skipped.
        results: Results from the engine, in order.
    """

    outcome: str
    message: str
    results: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """Result of all tests in one mode.

    Attributes:
        tests: Outcomes by pytest's test id.
        status: ``Suite.status()`` at the end; None without the suite.
        seconds: Duration of the whole process.
    """

    tests: Mapping[str, Outcome]
    status: Mapping[str, Any] | None
    seconds: float


def run_tests(folder: Path, mode: str) -> Run:
    """Run the tests in ``folder`` in one of ``MODES``, in a separate process.

    Args:
        folder: Folder with ``tests`` and ``models``; the store and the record are written there.
        mode: Key in ``MODES``.

    Raises:
        LlmaasError: No test was run, or the tests took too long.
    """
    record = folder / f"{mode.replace(' ', '-')}.jsonl"
    record.write_text("")
    (folder / "llmaas.toml").write_text(_CONFIG)
    (folder / "pytest.ini").write_text("[pytest]\n")
    started = time.perf_counter()
    try:
        done = subprocess.run(  # noqa: S603  the arguments are our own
            [*_python(MODES[mode]), *_pytest(record)],
            cwd=folder,
            env=_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise LlmaasError(f"{mode}: the tests took more than {_TIMEOUT_S} s") from error
    seconds = time.perf_counter() - started
    tests, status = read_record(record)
    if not tests:
        raise LlmaasError(f"{mode}: no test was run (exit {done.returncode}): {done.stdout[-800:]}")
    return Run(tests, status, seconds)


def _python(plugins: str | None) -> Sequence[str]:
    if plugins is None:
        return [sys.executable]
    llmaas = [sys.executable, "-m", "llmaas_plugins.cli.main"]
    return [*llmaas, "run", "--config", "llmaas.toml", "--plugins", plugins]


def _pytest(record: Path) -> Sequence[str]:
    plugins = ["-p", "no:cacheprovider", "-p", "llmaas_eval.peer_tests.recorder"]
    ours = ["--peer-models", "models", "--peer-record", record.name]
    return ["-m", "pytest", "-q", "-c", "pytest.ini", *plugins, *ours, "tests"]


def _environment() -> dict[str, str]:
    """Return an environment without the user's settings, pytest plugins and Hugging Face access."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("LLMAAS_", "PYTEST_"))}
    return kept | {
        "GGML_NO_BACKTRACE": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }


def read_record(path: Path) -> tuple[dict[str, Outcome], Mapping[str, Any] | None]:
    """Read the record: the last outcome of each test by id, and the suite's status."""
    tests, status = {}, None
    for text in path.read_text().splitlines():
        line = json.loads(text)
        if "test" in line:
            tests[line["test"]] = Outcome(line["outcome"], line["message"], tuple(line["results"]))
        else:
            status = line["status"]
    return tests, status

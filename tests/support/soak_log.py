"""A log of passed soak tests, so that an interrupted ``make soak`` can continue.

``--soak-log FILE`` appends each test's outcome and seconds as soon as it ends. A test that passed
with the same sources is not run again. Only this plugin reads the log; delete it to run all tests.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = (
    "native", "hooks", "patches", "llmaas_plugins", "eval/llmaas_eval", "tests", "conftest.py",
    "pyproject.toml", "CMakeLists.txt", "requirements-dev.txt",
)  # fmt: skip
"""Files whose change invalidates all earlier passes."""


class SoakLog:
    """Pytest plugin that records soak tests and leaves out those that have passed."""

    def __init__(self, path, *, writes):
        """Read the log at ``path`` if it exists; xdist's workers only read it."""
        self.writes = writes
        self.path = Path(path)
        self.sources = sources_digest()
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        entries = filter(None, map(_entry, lines))
        self.seconds = {
            entry["test"]: entry["seconds"]
            for entry in entries
            if entry["sources"] == self.sources and entry["outcome"] == "passed"
        }
        self.n_left_out = 0

    def pytest_collection_modifyitems(self, config, items):
        """Deselect tests that have passed."""
        done = [item for item in items if item.nodeid in self.seconds]
        self.n_left_out = len(done)
        config.hook.pytest_deselected(items=done)
        items[:] = [item for item in items if item.nodeid not in self.seconds]

    def pytest_runtest_logreport(self, report):
        """Append a test's outcome: the call's, or that of a failed setup or teardown."""
        is_outcome = report.when == "call" or not report.passed
        if not self.writes or not is_outcome or hasattr(report, "wasxfail"):
            return
        entry = {
            "test": report.nodeid,
            "outcome": report.outcome,
            "seconds": round(report.duration, 1),
            "sources": self.sources,
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as log:
            log.write(json.dumps(entry) + "\n")
        if report.passed:
            self.seconds[report.nodeid] = entry["seconds"]

    def pytest_terminal_summary(self, terminalreporter):
        """Print each passed test's time, from this run and from the runs it continues."""
        terminalreporter.section("soak")
        for test, seconds in sorted(self.seconds.items(), key=lambda entry: -entry[1]):
            terminalreporter.line(f"{seconds:9.1f} s  {test}")
        total = sum(self.seconds.values())
        terminalreporter.line(
            f"{total:9.1f} s  {len(self.seconds)} passed, {self.n_left_out} of them in earlier runs"
        )


def sources_digest():
    """Return a digest of everything the soak tests run."""
    names = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z", "--", *SOURCES],
        cwd=ROOT, capture_output=True, check=True,
    ).stdout.split(b"\0")  # fmt: skip
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(filter(None, names)):
        path = ROOT / name.decode()
        if path.is_file():
            digest.update(name + b"\0" + hashlib.blake2b(path.read_bytes()).digest())
    return digest.hexdigest()


def _entry(line):
    """Parse a line of the log; return None for a line cut off when its process ended."""
    try:
        return json.loads(line)
    except ValueError:
        return None

"""Start of a process for each system, in a memory group of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from llmaas_eval.switching.cost import Cost
from llmaas_eval.switching.groups import can_limit_memory, memory_group
from llmaas_eval.switching.results import RunResult
from llmaas_eval.switching.systems.base import Setting

__all__ = ["Job", "measure", "run"]

_KILLED = -9


@dataclass(frozen=True, slots=True)
class Job:
    """One system on one trace.

    Attributes:
        system: Name of the system in ``SYSTEMS``.
        trace: Trace file.
        setting: Setting of the system; the job makes a temporary folder in ``setting.folder``.
        cost: Measured cost of evaluation.
        n_calls: Number of calls to measure, the last ones of the trace; None measures all.
        disk_bps: Limit of reads and of writes in bytes per second; None sets no limit.
    """

    system: str
    trace: Path
    setting: Setting
    cost: Cost
    n_calls: int | None = None
    disk_bps: int | None = None


def run(job: Job) -> RunResult:
    """Run the job; a process that ends early, killed for its memory or not, is a failed run."""
    _read_all(job.setting.model)
    with tempfile.TemporaryDirectory(dir=job.setting.folder, prefix="switching-") as folder:
        values = asdict(job)
        values["setting"] |= {"folder": folder}
        try:
            return RunResult.from_json(_in_group({"kind": "replay", **values}))
        except subprocess.CalledProcessError as error:
            if error.returncode == _KILLED:
                return RunResult([], failure="killed: used more memory than its budget")
            return RunResult([], failure=f"failed with exit status {error.returncode}")


def measure(model: Path, max_tokens: int) -> Cost:
    """Measure the cost of evaluation in a process of its own."""
    return Cost(**_start({"kind": "cost", "model": model, "max_tokens": max_tokens}))


def _in_group(job: dict[str, Any]) -> dict[str, Any]:
    with memory_group() if can_limit_memory() else nullcontext() as group:
        return _start({**job, "group": None if group is None else group.path})


def _start(job: dict[str, Any]) -> dict[str, Any]:
    """Start a worker process and return its answer."""
    with tempfile.NamedTemporaryFile(suffix=".json") as answer:
        subprocess.run(  # noqa: S603  this package's own module
            [sys.executable, "-m", "llmaas_eval.switching.worker", answer.name],
            input=json.dumps(job, default=str).encode(),
            check=True,
        )
        found: dict[str, Any] = json.loads(Path(answer.name).read_bytes())
        return found


def _read_all(path: Path) -> None:
    """Read a file, so that its page cache is charged to this process: the first reader pays."""
    with path.open("rb", buffering=0) as file:
        while file.read(1 << 22):
            pass

"""Process of one system: load the engine, limit its own memory, and replay a trace."""

from __future__ import annotations

import contextlib
import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from llmaas_eval.disk import disk_limit
from llmaas_eval.switching.cost import Cost, measure_cost
from llmaas_eval.switching.groups import MemoryGroup
from llmaas_eval.switching.results import CallResult, RunResult
from llmaas_eval.switching.steps import Replay, Step, replay_of
from llmaas_eval.switching.systems import SYSTEMS, BudgetTooSmallError, Setting, System
from llmaas_eval.traces import read_trace

__all__ = ["main"]

_LONG_S = 3600.0  # enough to finish all work ahead of time


def main(job: dict[str, Any]) -> dict[str, Any]:
    """Do the job of the parent process and return the answer."""
    if job["kind"] == "cost":
        return asdict(measure_cost(Path(job["model"]), job["max_tokens"]))
    setting = job["setting"]
    setting = Setting(
        **{**setting, "model": Path(setting["model"]), "folder": Path(setting["folder"])}
    )
    what = replay_of(read_trace(Path(job["trace"])).calls, setting.max_tokens, job["n_calls"])
    cost = Cost(**job["cost"])
    try:
        return _run(job, setting, what, cost).to_json()
    except BudgetTooSmallError as error:
        return RunResult([], failure=f"does not fit: {error}").to_json()


def _run(job: dict[str, Any], setting: Setting, what: Replay, cost: Cost) -> RunResult:
    group = MemoryGroup(Path(job["group"])) if job["group"] else None
    if group is not None:
        group.join()
    system = SYSTEMS[job["system"]](setting)
    try:
        base = limit = 0
        if group is not None:
            base = group.used - system.cell_bytes
            limit = setting.budget + system.lent_bytes
            group.limit(base + limit)
        replay = _Replay(system, cost)
        for step in what.fills:
            replay.call(step, math.inf)
        following = [*(step.time_s for step in what.steps[1:]), math.inf]
        with _throttled(setting.folder, job["disk_bps"]):
            calls = [
                replay.call(step, next_s, job["disk_bps"])
                for step, next_s in zip(what.steps, following, strict=True)
            ]
        peak = 0 if group is None else group.peak - base
        return RunResult(calls, None, base, limit, peak, system.status())
    finally:
        system.close()


def _throttled(folder: Path, bytes_per_s: int | None) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext() if bytes_per_s is None else disk_limit(folder, bytes_per_s)


class _Replay:
    """Replay of calls in virtual time: the replay skips the idle time between calls."""

    def __init__(self, system: System, cost: Cost) -> None:
        self._system = system
        self._cost = cost
        self._called = -1
        self._free_s = 0.0
        """Virtual time at which the previous call returned."""

    def call(self, step: Step, next_s: float, disk_bps: int | None = None) -> CallResult:
        """Do one call, and the work after it that is done by ``next_s``.

        A limited disk lets a tenth of a second's worth of bytes pass at once. So a call is charged
        at least the time that its bytes take at the limit.
        """
        io_0, clock_0 = _device_bytes(), time.perf_counter()
        entered = self._system.enter(step)
        enter_s, io_1 = time.perf_counter() - clock_0, _device_bytes()
        if disk_bps is not None:
            most_bytes = max(after - before for before, after in zip(io_0, io_1, strict=True))
            enter_s = max(enter_s, most_bytes / disk_bps)
        n_held = len(step.before) - entered.n_missing
        recompute_s = self._cost.prompt_s(n_held, entered.n_missing)
        self._system.grow(step, entered)
        leave_s = _seconds(partial(self._system.leave, step))
        evaluate_s = self._cost.prompt_s(len(step.before), step.n_prompt)
        evaluate_s += self._cost.reply_s * step.n_reply
        busy_s = enter_s + recompute_s + evaluate_s + leave_s
        self._free_s = max(step.time_s, self._free_s) + busy_s
        idle_s = min(_LONG_S, max(0.0, next_s - self._free_s))
        background_s = _seconds(partial(self._system.background, step, idle_s))
        io_2 = _device_bytes()
        is_switch = step.context != self._called
        self._called = step.context
        return CallResult(
            context=step.context,
            is_switch=is_switch,
            slides=step.slides,
            n_before=len(step.before),
            n_new=step.n_prompt + step.n_reply,
            **asdict(entered),
            enter_s=enter_s,
            recompute_s=recompute_s,
            leave_s=leave_s,
            background_s=background_s,
            read_bytes=io_1[0] - io_0[0],
            written_bytes=io_1[1] - io_0[1],
            later_read_bytes=io_2[0] - io_1[0],
            later_written_bytes=io_2[1] - io_1[1],
        )


def _seconds(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _device_bytes() -> tuple[int, int]:
    """Return the bytes that devices read and wrote for this process."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["read_bytes"]), int(fields["write_bytes"])


if __name__ == "__main__":
    answer = main(json.loads(sys.stdin.read()))
    Path(sys.argv[1]).write_text(json.dumps(answer))

"""Order of calls by the time at which their next output is due (earliest deadline first).

A call keeps the engine as long as the others can wait for its end. If one of them cannot, the call
is interrupted, provided that it stays in time itself. A call that names no latency, or is late in
any case, is due when it may not be overtaken any more, so that no call waits for ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Job", "due_s", "first_due", "interrupting", "room_s"]

_SWITCH_S = 0.02
"""Seconds that an interruption is taken to cost."""


class Job(NamedTuple):
    """Work on the engine that remains until a call's output is due.

    Attributes:
        due_s: Time at which the output is due.
        need_s: Seconds on the engine until then.
        came_s: Time of the call's arrival, which decides between equals.
    """

    due_s: float
    need_s: float
    came_s: float

    def slack_s(self, now_s: float) -> float:
        """Return for how long the call can wait."""
        return self.due_s - now_s - self.need_s


def due_s(limit_s: float | None, soonest_s: float, last_s: float) -> float:
    """Return when an output is due.

    Args:
        limit_s: Time that was promised; None if none was.
        soonest_s: Earliest time at which the output can come.
        last_s: Time from which the call may not be overtaken.
    """
    return last_s if limit_s is None or limit_s < soonest_s else limit_s


def first_due(jobs: Sequence[Job]) -> int:
    """Return the index of the job that is due first."""
    return _by_due(jobs)[0]


def interrupting(running: Job, others: Sequence[Job], now_s: float) -> int | None:
    """Return the index of the job that goes before the rest of the running one; None if none does.

    That is the one that is due first, if one of the others would be late after the running job, but
    not before it, and if the running job is in time even so. Nothing goes before a job that is
    overdue.
    """
    first, before_s = None, 0.0
    for i in _by_due(others):
        if others[i].due_s <= now_s:
            is_in_time = running.slack_s(now_s) >= others[i].need_s + 2 * _SWITCH_S
            return i if is_in_time else None
        due, before_s = others[i].due_s - now_s, before_s + others[i].need_s
        if due < before_s:  # late in any case
            before_s -= others[i].need_s
            continue
        first = i if first is None else first
        if due < before_s + running.need_s:
            return first if running.slack_s(now_s) >= before_s + 2 * _SWITCH_S else None
    return None


def room_s(behind: Sequence[Job], now_s: float) -> float | None:
    """Return how long a call may take so that those behind it are in time; None if any time.

    Calls that would be late in any case do not count.
    """
    room, before_s = None, 0.0
    for i in _by_due(behind):
        before_s += behind[i].need_s
        found = behind[i].due_s - now_s - before_s
        if found > 0:
            room = found if room is None else min(room, found)
    return room


def _by_due(jobs: Sequence[Job]) -> list[int]:
    """Return the jobs' indices, the one that is due first at the beginning."""
    return sorted(range(len(jobs)), key=lambda i: (jobs[i].due_s, jobs[i].came_s))

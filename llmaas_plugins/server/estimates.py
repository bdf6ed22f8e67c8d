"""Times that an app's next call is expected to take on the engine, from its calls before."""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from llmaas_hooks import Limit, Promise
from llmaas_plugins.server.calls import Call
from llmaas_plugins.server.prompt_pieces import LEAST_PIECE, MOST_PIECE, PIECE_S
from llmaas_plugins.server.schedule import Job, due_s

__all__ = ["AppTimes", "Estimates", "mean"]

_MOST_APPS = 256
_WEIGHT = 0.3
"""Weight of the newest time in a running mean."""
_N_RECENT, _FIRST_S = 8, 0.1
"""Number of an app's calls whose times are kept, and the time before any."""
_MORE, _LESS = 0.2, 0.005
"""Steps of the pressure: in balance, other calls use a larger share of one call in 41."""
_FIRST_PRESSURE, _MOST_PRESSURE = 0.5, 0.95
"""Pressure from when calls meet for the first time, and the highest one."""
_WHOLE_S = Promise(Limit(1.0), Limit(0.1))
"""Times of the whole model for an app of which none is known."""


@dataclass(slots=True)
class AppTimes:
    """Times of an app's calls.

    Attributes:
        recent_first_s: Seconds on the engine until the first token, of recent calls.
        token_s: Seconds of a further token.
        limits: Seconds that a limit of the app stood for last, by phase and limit.
    """

    recent_first_s: deque[float] = field(default_factory=lambda: deque(maxlen=_N_RECENT))
    token_s: float = 0.02
    limits: dict[tuple[str, str], float] = field(default_factory=dict)

    @property
    def least_first_s(self) -> float:
        """Seconds until the first token that a call can do with, as its levels leave room."""
        return min(self.recent_first_s, default=_FIRST_S)


class Estimates:
    """Running means by app, and of the time of a prompt's token.

    Attributes:
        pressure: Share of the limits that calls leave for others: a quantile of the shares that
            other calls have used of them.
    """

    def __init__(self) -> None:
        """Start without any call."""
        self._apps: OrderedDict[str, AppTimes] = OrderedDict()
        self._token_s: float | None = None
        self._have_met = False
        self.pressure = 0.0

    def meet(self) -> None:
        """Learn that a call arrived while another one had the engine."""
        if not self._have_met:
            self._have_met = True
            self.pressure = _FIRST_PRESSURE

    def of(self, app: str) -> AppTimes:
        """Return the times of an app's calls."""
        found = self._apps.setdefault(app, AppTimes())
        self._apps.move_to_end(app)
        while len(self._apps) > _MOST_APPS:
            self._apps.popitem(last=False)
        return found

    def limit_s(self, app: str, name: str, limit: Limit | None) -> float | None:
        """Return the seconds that an app's limit stands for; None if there is no limit."""
        if limit is None or not limit.is_share:
            return None if limit is None else limit.value
        unknown = limit.seconds(getattr(_WHOLE_S, name).value)
        return self.of(app).limits.get((name, str(limit)), unknown)

    def is_late(self, app: str, limit: Limit | None, passed_s: float) -> bool:
        """Return whether a first token is later than promised after this time.

        It is not if nothing was promised, or a share of a time that is not known.
        """
        if limit is None or (limit.is_share and ("ttft", str(limit)) not in self.of(app).limits):
            return False
        limit_s = self.limit_s(app, "ttft", limit)
        return limit_s is not None and passed_s > limit_s

    def job(self, call: Call, used_s: float, now_s: float, last_s: float) -> Job:
        """Return what remains of a call, and when it is due.

        Args:
            call: The call.
            used_s: Seconds for which it has used the engine.
            now_s: Time of now.
            last_s: Time from which it may not be overtaken any more.
        """
        times = self.of(call.app)
        if call.first_s is None:
            need_s = max(times.least_first_s - used_s, 0)
            limit_s = self.limit_s(call.app, "ttft", call.promise.ttft)
            due = None if limit_s is None else call.came_s + limit_s
            soonest_s = now_s + need_s
        else:
            n_left = call.promise.n_ahead(call.n_generated)
            need_s = n_left * (call.token_s(used_s) or times.token_s)
            limit_s = self.limit_s(call.app, "tpot", call.promise.tpot)
            due = limit_s and call.first_s + (call.n_generated + n_left - 1) * limit_s
            soonest_s = now_s  # narrower levels may make up for lost time
        return Job(due_s(due, soonest_s, last_s), need_s, call.came_s)

    def learn(self, call: Call, notes: Mapping[str, Any]) -> None:
        """Learn from a call that ended and had its turn until now; notes are as in ``called``."""
        if call.first_s is None or call.first_used_s is None:
            self.called(call.app, None, None, notes)
            return
        now_s = time.perf_counter()
        n_others = max(call.n_generated, 1)
        answer_s, used_s = now_s - call.first_s, call.used(now_s) - call.first_used_s
        token_s = used_s / n_others if call.n_generated > 1 else None
        self.called(call.app, call.first_used_s, token_s, notes)
        first_others_s = call.first_s - call.came_s - call.first_used_s
        others_s = {"ttft": first_others_s, "tpot": (answer_s - used_s) / n_others}
        self.judge(notes, others_s)

    def called(
        self, app: str, first_s: float | None, token_s: float | None, notes: Mapping[str, Any]
    ) -> None:
        """Learn from a call that ended.

        Args:
            app: Name of the app.
            first_s: Seconds on the engine until the first token; None if there was none.
            token_s: Mean seconds of a further token; None if there was none.
            notes: Notes of the plugin ``deadlines`` about the call.
        """
        times = self.of(app)
        if first_s is not None:
            times.recent_first_s.append(first_s)
        if token_s is not None:
            times.token_s = mean(times.token_s, token_s)
        for name in ("ttft", "tpot"):
            promised = notes.get(name) or {}
            if promised.get("promised_ms"):
                times.limits[name, promised["promised"]] = promised["promised_ms"] / 1000
        while len(times.limits) > _MOST_APPS:
            del times.limits[next(iter(times.limits))]

    def judge(self, notes: Mapping[str, Any], others_s: Mapping[str, float]) -> None:
        """Adjust the pressure to a call that ended.

        Args:
            notes: Notes of the plugin ``deadlines`` about the call.
            others_s: Seconds of the time to the first token, and of each further token, in which
                other calls used the engine.
        """
        limits = {name: (notes.get(name) or {}).get("promised_ms") for name in ("ttft", "tpot")}
        shares = [1000 * others_s[name] / ms for name, ms in limits.items() if ms]
        if shares:
            change = _MORE if max(shares) > self.pressure else -_LESS
            self.pressure = min(max(self.pressure + change, 0.0), _MOST_PRESSURE)

    def prefilled(self, n_tokens: int, seconds: float) -> None:
        """Learn from a batch of a prompt."""
        if n_tokens >= LEAST_PIECE:
            self._token_s = mean(self._token_s, seconds / n_tokens)

    def piece(self) -> int:
        """Return the number of a prompt's tokens that take about 100 ms, a power of two."""
        if not self._token_s:
            return MOST_PIECE
        n_tokens = int(PIECE_S / self._token_s)
        return min(max(1 << max(n_tokens.bit_length() - 1, 0), LEAST_PIECE), MOST_PIECE)


def mean(former: float | None, newest: float) -> float:
    """Return the running mean after its newest time."""
    return newest if former is None else former + _WEIGHT * (newest - former)

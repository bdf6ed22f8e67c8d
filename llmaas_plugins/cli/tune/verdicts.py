"""Verdicts on figures: whether a plugin is worth switching on, and why."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Literal

from pydantic import BaseModel, ConfigDict

from llmaas_plugins.cli.output import size_text
from llmaas_plugins.cli.tune.figures import Case, Figures
from llmaas_plugins.cli.tune.levels import PREPARED
from llmaas_plugins.cli.tune.streaming import EXACT, SPARSE
from llmaas_plugins.cli.tune.together import TOGETHER
from llmaas_plugins.demo.interval import Interval

__all__ = ["Verdict", "speed_text", "verdict_on"]

MOST_LOSS = 0.05
"""Largest rise of a token's loss that counts as the same quality: 5 % of the perplexity."""
_SLOWER = 0.99
"""Speed below which a plugin that promises to cost nothing costs too much."""


class Verdict(BaseModel):
    """Verdict on a plugin.

    Attributes:
        state: Whether it is switched on; off too if it could not be measured, or broke a promise.
            A plugin for which there was no time stays as it is.
        reason: The reason, in words.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    state: Literal["on", "off", "failed", "broken", "left out"]
    reason: str

    @property
    def is_passed(self) -> bool:
        """Whether nothing went wrong."""
        return self.state in {"on", "off", "left out"}


def verdict_on(plugin: str, figures: Figures, others: Mapping[str, Verdict]) -> Verdict:
    """Return the verdict on a plugin.

    Args:
        plugin: Name of the plugin, or of the part that measures all of them together.
        figures: Its figures.
        others: Verdicts on the plugins before it.
    """
    if figures.broken:
        return Verdict(state="broken", reason="; ".join(dict.fromkeys(figures.broken)))
    if figures.unserved is not None and not figures.cases:
        return Verdict(state="off", reason=figures.unserved)
    if figures.unserved is not None:
        return Verdict(state="off", reason=f"it leaves the model as it is: {figures.unserved}")
    is_on, reason = _JUDGES[plugin]({case.name: case for case in figures.cases}, figures, others)
    return Verdict(state="on" if is_on else "off", reason=reason)


def speed_text(speed: Interval) -> str:
    """Return a speed relative to vanilla's, with its interval."""
    return f"{_times(speed.value)} [{_times(speed.low)}, {_times(speed.high)}]"


# -- inside --------------------------------------------------------------------------------------

_Found = tuple[bool, str]
_Judge = Callable[[Mapping[str, Case], Figures, Mapping[str, Verdict]], _Found]


def _restores(cases: Mapping[str, Case], _figures: Figures, _others: object) -> _Found:
    ram = cases["from RAM"]
    if (worse := _worse(cases.values())) is not None:
        return False, worse
    speeds = " and ".join(f"{speed_text(one.first_speed)} {name}" for name, one in cases.items())
    if ram.first_speed.low <= 1:
        return False, f"contexts do not come back faster than they are evaluated: {speeds}"
    return True, f"contexts come back faster than they are evaluated: {speeds}"


def _levels(cases: Mapping[str, Case], _figures: Figures, _others: object) -> _Found:
    source = cases.get(PREPARED)
    if source is not None and (worse := _worse([source])) is not None:
        return False, worse
    narrow = [case for name, case in cases.items() if name not in {PREPARED, "level 1.0"}]
    fastest = max(narrow, key=lambda case: max(_lows(case)))
    text = (
        f"{fastest.name} gives the first token {speed_text(fastest.first_speed)} as fast and a "
        f"token {_optional(fastest.token_speed)} as fast, at {_loss_text(fastest)}"
    )
    if max(_lows(fastest)) <= 1:
        return False, f"no level is faster than the whole model: {text}"
    return True, text


def _deadlines(
    cases: Mapping[str, Case], _figures: Figures, others: Mapping[str, Verdict]
) -> _Found:
    elastic = others.get("elastic")
    if elastic is None or elastic.state != "on":
        return False, "it chooses among the levels of elastic, which is off"
    (case,) = cases.values()
    text = f"a token {_optional(case.token_speed)} as fast, if no latency is named"
    speeds = [case.first_speed, *([case.token_speed] if case.token_speed else [])]
    if any(speed.high < _SLOWER for speed in speeds):
        return False, f"it makes requests slower that name nothing: {text}"
    return True, text


def _streaming(cases: Mapping[str, Case], figures: Figures, _others: object) -> _Found:
    exact, sparse = cases.get(EXACT), cases.get(SPARSE)
    memory = "" if figures.peak_bytes is None else f" in {size_text(figures.peak_bytes)} of memory"
    if exact is None and sparse is not None:  # it fits
        speed = sparse.token_speed
        text = f"sparse tokens are {_optional(speed)} as fast, at {_loss_text(sparse)}"
        return speed is not None and speed.low > 1, text
    texts = [
        f"{case.name} tokens are {_optional(case.token_speed)} as fast as with all of the "
        f"machine's memory, at {_loss_text(case)}"
        for case in cases.values()
    ]
    return True, f"the model runs{memory}: {'; '.join(texts)}"


def _datastore(cases: Mapping[str, Case], _figures: Figures, _others: object) -> _Found:
    (case,) = cases.values()
    text = (
        f"{_loss_text(case)} on chats that it has not seen, with tokens "
        f"{_optional(case.token_speed)} as fast"
    )
    if case.loss_change.high >= 0:
        return False, f"no sure gain: {text}"
    return True, text


def _together(cases: Mapping[str, Case], _figures: Figures, _others: object) -> _Found:
    (case,) = cases.values()
    return True, (
        f"first token {speed_text(case.first_speed)} and tokens {_optional(case.token_speed)} as "
        f"fast, at {_loss_text(case)}"
    )


_JUDGES: Mapping[str, _Judge] = {
    "kv_chunks": _restores,
    "elastic": _levels,
    "deadlines": _deadlines,
    "flash_weights": _streaming,
    "knn_lm": _datastore,
    TOGETHER: _together,
}


def _worse(cases: Iterable[Case]) -> str | None:
    """Return a sentence about a case that surely predicts worse than vanilla; None without one."""
    for case in cases:
        if case.loss_change.low > MOST_LOSS:
            return f"{case.name}: it predicts worse, with {_loss_text(case)}"
    return None


def _lows(case: Case) -> tuple[float, ...]:
    speeds = [case.first_speed, *([case.token_speed] if case.token_speed else [])]
    return tuple(speed.low for speed in speeds)


def _loss_text(case: Case) -> str:
    low, high = (math.expm1(change) for change in case.loss_change[1:])
    value = math.expm1(case.loss_change.value)
    return f"{100 * value:+.1f} % [{100 * low:+.1f}, {100 * high:+.1f}] of the perplexity"


def _optional(speed: Interval | None) -> str:
    return "-" if speed is None else speed_text(speed)


def _times(speed: float) -> str:
    return f"{speed:.2f}×" if speed < 10 else f"{speed:.0f}×"

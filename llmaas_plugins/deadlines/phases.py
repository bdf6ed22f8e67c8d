"""Times of a request's prompt and answer at each level, for each prompt that it could read."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, Self

from llmaas_hooks import Levels, LevelTimes, Promise, RequestCost, ShorterPrompt
from llmaas_plugins.deadlines.correction import Fit
from llmaas_plugins.deadlines.policies import Policy
from llmaas_plugins.deadlines.worth import Worth

__all__ = [
    "Options",
    "Phase",
    "Question",
    "Reading",
    "answer_options",
    "limits_of",
    "prompt_options",
]

_ROUNDING = 1e-9


class Phase(NamedTuple):
    """Plan of the prompt, or of the answer.

    Attributes:
        level: Level to use.
        limit_s: Promised time; None if there is none.
        table_s: Time by the tables alone, from the request's beginning.
        expected_s: Time to expect, with the time that the request waited.
        is_feasible: Whether the time is rarely longer than promised.
    """

    level: float
    limit_s: float | None
    table_s: float
    expected_s: float
    is_feasible: bool


class Reading(NamedTuple):
    """Prompt that a request reads: the whole one, or a shorter one.

    A shorter prompt has no warm prefix, as cells are named by the tokens that were evaluated.

    Attributes:
        share: Share of the prompt's tokens that is asked for; 1 is the whole prompt.
        n_tokens: Number of tokens that are read.
        n_evaluated: Number of tokens that must be evaluated.
        before_s: Seconds until their evaluation begins: to restore cells, or to choose the tokens.
    """

    share: float
    n_tokens: int
    n_evaluated: int
    before_s: float

    @property
    def is_whole(self) -> bool:
        """Whether the whole prompt is read."""
        return self.share == 1

    @classmethod
    def of(cls, shorter: ShorterPrompt, before_s: float) -> Self:
        """Return the reading of a shorter prompt, whose words take ``before_s`` to choose."""
        return cls(shorter.share, shorter.n_tokens, shorter.n_tokens, before_s)


class Question(NamedTuple):
    """Everything that a plan depends on.

    Attributes:
        promise: Latency that is asked for.
        cost: Times that plugins predict.
        n_prompt: Number of tokens of the whole prompt.
        asked: Levels, and share of the prompt, that the app itself sets.
        ttft: Correction of times to the first token.
        tpot: Correction of times of further tokens.
        policies: Policies whose risk is certified, if the risk is limited; else empty.
        n_answer: Number of tokens of an answer that count for the risk.
        worth: Probability of the whole model's answer; None if it is unknown.
    """

    promise: Promise
    cost: RequestCost
    n_prompt: int
    asked: Levels = Levels()
    ttft: Fit = Fit()
    tpot: Fit = Fit()
    policies: tuple[Policy, ...] = ()
    n_answer: int = 1
    worth: Worth | None = None

    @property
    def whole(self) -> Reading:
        """The whole prompt."""
        n_evaluated = max(self.n_prompt - self.cost.n_ready, 1)
        return Reading(1.0, self.n_prompt, n_evaluated, self.cost.ready_s)

    @property
    def readings(self) -> tuple[Reading, ...]:
        """Prompts to choose from, longest first: the one nearest to what the app asks for, or all.

        With a limit of the risk, prompts stay whole unless the app shortens them, as certificates
        are for whole prompts.
        """
        shorter = [Reading.of(one, self._choosing_s(one)) for one in self.cost.shorter]
        found = self.whole, *shorter
        share = self.asked.prompt_share
        if share is not None:
            return (min(found, key=lambda one: abs(one.share - share)),)
        return found[:1] if self.policies else found

    def reading_of(self, n_tokens: int, share: float | None) -> Reading:
        """Return the prompt that a request reads.

        Args:
            n_tokens: Number of its tokens. It may be less than announced, as words are not divided.
            share: Share of the prompt that was asked for; None if a plugin chose it.
        """
        if n_tokens == self.n_prompt:
            return self.whole
        asked = n_tokens / self.n_prompt if share is None else share
        near = min(self.cost.shorter, key=lambda one: abs(one.share - asked), default=None)
        return Reading(asked, n_tokens, n_tokens, 0.0 if near is None else self._choosing_s(near))

    def _choosing_s(self, shorter: ShorterPrompt) -> float:
        """Return the seconds that it takes to choose the words of a shorter prompt."""
        if shorter.seconds is not None:
            return shorter.seconds
        return self.cost.levels[-1].ttft_s(self.n_prompt) if self.cost.levels else 0.0


class Options(NamedTuple):
    """Levels that a phase may use, and their times.

    Attributes:
        times: Seconds by level, widest level first; only times that make sense.
        limit_s: Promised time; None if there is none.
        fit: Correction of the times.
        waited_s: Seconds that the request waited.
        room_s: Seconds that other requests leave; None if there are none.
    """

    times: dict[float, float]
    limit_s: float | None
    fit: Fit
    waited_s: float = 0.0
    room_s: float | None = None

    def most_s(self, level: float) -> float:
        """Return a time that a level rarely exceeds."""
        return self.fit.most_s(self.times[level])

    def fits(self, level: float) -> bool:
        """Return whether a level may be used and rarely takes longer than promised."""
        if level not in self.times:
            return False
        most_s = self.waited_s + self.most_s(level)
        return self.limit_s is None or most_s <= self.limit_s * (1 + _ROUNDING)

    def leaves_room(self, level: float) -> bool:
        """Return whether a level fits, and other requests keep their promises, too."""
        return self.fits(level) and (self.room_s is None or self.most_s(level) <= self.room_s)

    def phase(self, level: float) -> Phase:
        """Return the plan of a phase at a level."""
        table_s = self.times[level]
        expected_s = self.waited_s + self.fit.expected_s(table_s)
        return Phase(level, self.limit_s, table_s, expected_s, self.fits(level))

    def same(self, phase: Phase | None) -> Phase | None:
        """Return the plan at the level of another plan; None if it has no time here."""
        return None if phase is None or phase.level not in self.times else self.phase(phase.level)

    def widest(self) -> Phase | None:
        """Return the plan at the widest level that leaves room, or else at the fastest one."""
        if not self.times or (self.limit_s is not None and not _is_time(self.limit_s)):
            return None
        found = next(filter(self.leaves_room, self.times), None)
        return self.phase(min(self.times, key=self.times.__getitem__) if found is None else found)


def prompt_options(question: Question, reading: Reading) -> Options:
    """Return the levels of a prompt.

    A share of time is of the whole model's for the whole prompt.
    """
    cost, promise = question.cost, question.promise
    whole_s = question.ttft.most_s(cost.levels[0].ttft_s(question.n_prompt))
    limit_s = promise.ttft and promise.ttft.seconds(whole_s)

    def seconds(one: LevelTimes) -> float:
        return reading.before_s + one.ttft_s(reading.n_evaluated)

    return Options(
        _times(question.asked.prefill, seconds, cost),
        limit_s,
        question.ttft,
        promise.waited_s,
        _room(limit_s, promise, promise.room_s),
    )


def answer_options(question: Question, reading: Reading) -> Options:
    """Return the levels of an answer.

    A share of time is of the whole model's after the whole prompt.
    """
    promise = question.promise
    whole_s = question.tpot.most_s(question.cost.levels[0].tpot_s(question.n_prompt))
    limit_s = promise.tpot and promise.tpot.seconds(whole_s)
    return Options(
        _times(question.asked.decode, lambda one: one.tpot_s(reading.n_tokens), question.cost),
        limit_s,
        question.tpot,
        room_s=_room(limit_s, promise),
    )


def limits_of(question: Question) -> dict[str, float | None]:
    """Return the promised seconds by phase.

    They are None for a phase without a promise, and for a share of a time that was not measured.
    """
    if question.cost.levels:
        options = {"ttft": prompt_options, "tpot": answer_options}
        found = {name: of(question, question.whole).limit_s for name, of in options.items()}
        return {name: limit_s if _is_time(limit_s) else None for name, limit_s in found.items()}
    limits = {"ttft": question.promise.ttft, "tpot": question.promise.tpot}
    return {
        name: None if one is None or one.is_share else one.value for name, one in limits.items()
    }


# -- inside --------------------------------------------------------------------------------------


def _is_time(seconds: float | None) -> bool:
    return seconds is not None and 0 < seconds < math.inf


def _room(limit_s: float | None, promise: Promise, room_s: float | None = None) -> float | None:
    """Return the seconds that other requests leave: those behind this one, and those to come."""
    if limit_s is None or not promise.pressure:
        return room_s
    found = (1 - promise.pressure) * limit_s
    return found if room_s is None else min(found, room_s)


def _times(
    asked: float | None, seconds: Callable[[LevelTimes], float], cost: RequestCost
) -> dict[float, float]:
    levels = _usable(cost.levels, asked)
    return {one.level: s for one in levels if 0 < (s := seconds(one)) < math.inf}


def _usable(levels: tuple[LevelTimes, ...], asked: float | None) -> tuple[LevelTimes, ...]:
    """Return the levels to choose from: the one that serves what the app asks for, or all."""
    if asked is None:
        return levels
    return next(((one,) for one in levels if one.level <= asked + _ROUNDING), levels[-1:])

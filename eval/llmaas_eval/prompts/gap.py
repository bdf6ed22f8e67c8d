"""Constant settings and the oracle that knows each prompt's best one, as pure functions."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmaas_eval.deadlines.loaded.traces import SHARES
from llmaas_eval.results import Result

__all__ = [
    "BY_KIND",
    "CONSTANT",
    "LIMITS",
    "ONE_LEVEL",
    "ORACLE",
    "PAPER",
    "Chosen",
    "Cost",
    "Setting",
    "chosen",
    "costs",
    "feasible",
    "settings",
]

Values = NDArray[np.float64]

CONSTANT, BY_KIND, ORACLE = "best constant", "best by kind", "oracle"
"""Names of choices with which others are compared."""
PAPER, ONE_LEVEL = "two softmaxes", "best constant, one level"
"""The paper's choice, and the constant that it is compared with: both of settings whose prompt and
answer have one level."""

_FURTHER = ((30, 100), (30, 50), (20, 100))
_OF_APPS = [(round(100 * one.ttft), round(100 * one.tpot)) for one in SHARES.values()]
LIMITS = tuple(sorted([*_OF_APPS, *_FURTHER], reverse=True))
"""Limits in percent of the whole model's times: of the first token, and of each further one.

They are those of ElastiLM's six apps, and others in between; the first ones are no limits.
"""

_LEVEL, _PREFILL, _TOKEN = "level", "512 tokens, 2 threads", "token, 2 threads"


class Setting(NamedTuple):
    """Share of a prompt that is read, and the levels of prompt and answer."""

    share: float
    prefill: float
    decode: float


class Cost(NamedTuple):
    """Times of a level as shares of the whole model's: of a prompt, and of a further token."""

    prefill: float
    decode: float


class Chosen(NamedTuple):
    """Quality of each prompt under a limit, shape ``(n_prompts,)``.

    Attributes:
        constant: With the constant setting that is best on the other half of the prompts.
        by_kind: With the setting that is best on the prompt's kind in the other half.
        oracle: With each prompt's own best setting.
        best: The constant setting that is best on all prompts.
    """

    constant: Values
    by_kind: Values
    oracle: Values
    best: Setting


def costs(times: Result) -> Mapping[float, Cost]:
    """Return the costs of levels, from the table of their measured times."""
    rows = [dict(zip(times.columns, row, strict=True)) for row in times.rows]
    whole = rows[0]
    return {
        _number(row[_LEVEL]) / 100: Cost(
            _number(row[_PREFILL]) / _number(whole[_PREFILL]),
            _number(row[_TOKEN]) / _number(whole[_TOKEN]),
        )
        for row in rows
    }


def settings(
    shares: Sequence[float], prefills: Sequence[float], decodes: Sequence[float]
) -> list[Setting]:
    """Return all settings, in the order of an array with these axes."""
    return [Setting(*one) for one in itertools.product(shares, prefills, decodes)]


def feasible(
    some: Sequence[Setting],
    cost: Mapping[float, Cost],
    limits: tuple[float, float],
    scorer: float = 0.0,
) -> NDArray[np.bool_]:
    """Return which settings are within limits.

    Args:
        some: The settings.
        cost: Costs of levels.
        limits: Largest times of a first token and of a further one, as shares of the whole model's.
        scorer: Time of the scorer, as a share of the whole model's time to the first token. Whole
            prompts need no scorer.
    """
    ttft, tpot = (limit + _ROUNDING for limit in limits)
    return np.array([
        one.share * cost[one.prefill].prefill + (scorer if one.share < 1 else 0.0) <= ttft
        and cost[one.decode].decode <= tpot
        for one in some
    ])  # fmt: skip


_ROUNDING = 1e-9


def chosen(
    quality: Values,
    some: Sequence[Setting],
    is_feasible: NDArray[np.bool_],
    kinds: NDArray[np.str_],
) -> Chosen:
    """Choose settings for each prompt.

    Args:
        quality: Quality by prompt and setting, ``(n_prompts, n_settings)``; more is better.
        some: The settings.
        is_feasible: Whether a setting may be used, ``(n_settings,)``; at least one may.
        kinds: Kind of each prompt.
    """
    allowed = np.where(is_feasible, quality, -np.inf)
    constant, by_kind = np.empty((2, len(quality)))
    halves = _halves(kinds)
    for mine, others in (halves, ~halves), (~halves, halves):
        constant[mine] = quality[mine, _best(allowed, others, mine)]
        for kind in np.unique(kinds[mine]):
            of_it = kinds == kind
            best = _best(allowed, others & of_it, mine & of_it)
            by_kind[mine & of_it] = quality[mine & of_it, best]
    everything = np.ones(len(quality), np.bool_)
    best = _best(allowed, everything, everything)
    return Chosen(constant, by_kind, allowed.max(axis=1), some[best])


def _halves(kinds: NDArray[np.str_]) -> NDArray[np.bool_]:
    """Return which prompts are in the first of two halves, in which each kind is the same share."""
    is_first = np.empty(len(kinds), np.bool_)
    for kind in np.unique(kinds):
        places = np.flatnonzero(kinds == kind)
        is_first[places] = np.arange(len(places)) % 2 == 0
    return is_first


def _best(quality: Values, judges: NDArray[np.bool_], instead: NDArray[np.bool_]) -> int:
    """Return the setting that is best on some prompts, or on others if there are none of these.

    The first of equal ones counts.
    """
    some = quality[judges if judges.any() else instead]
    return int(some.mean(axis=0).argmax()) if len(some) else 0


def _number(text: str) -> float:
    return float(text.replace(",", "").split()[0])

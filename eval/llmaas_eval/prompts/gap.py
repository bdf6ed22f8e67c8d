"""Constant settings and the oracle that knows each prompt's best one, as pure functions."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmaas_eval.results import Result

__all__ = ["Chosen", "Cost", "Setting", "chosen", "costs", "feasible", "settings"]

Values = NDArray[np.float64]

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
    some: Sequence[Setting], cost: Mapping[float, Cost], ttft: float, tpot: float
) -> NDArray[np.bool_]:
    """Return which settings are within limits, which are shares of the whole model's times.

    A prompt costs its share times its level's cost; the scorer's own time does not count.
    """
    return np.array([
        one.share * cost[one.prefill].prefill <= ttft + _ROUNDING
        and cost[one.decode].decode <= tpot + _ROUNDING
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
    return Chosen(
        _crossed(quality, allowed, np.zeros(len(kinds))),
        _crossed(quality, allowed, kinds),
        allowed.max(axis=1),
        some[_best(allowed)],
    )


def _crossed(quality: Values, allowed: Values, groups: NDArray[Any]) -> Values:
    """Return each prompt's quality with the setting that is best on half of its group."""
    found = np.empty(len(quality))
    for group in np.unique(groups):
        places = np.flatnonzero(groups == group)
        for mine, others in (places[::2], places[1::2]), (places[1::2], places[::2]):
            judges = others if len(others) else mine  # a single prompt, as in quick runs
            found[mine] = quality[mine, _best(allowed[judges])]
    return found


def _best(quality: Values) -> int:
    """Return the best constant setting; of equal ones, the first."""
    return int(quality.mean(axis=0).argmax())


def _number(text: str) -> float:
    return float(text.replace(",", "").split()[0])

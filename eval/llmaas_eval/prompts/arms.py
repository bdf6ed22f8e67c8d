"""Ways to choose settings of prompts under a promise, judged on documents that were held out."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmaas_eval.prompts import gap
from llmaas_eval.prompts.gap import (
    BY_KIND,
    CONSTANT,
    ONE_LEVEL,
    ORACLE,
    PAPER,
    Cost,
    Setting,
    feasible,
    settings,
)
from llmaas_eval.prompts.heads import Chances, Fit, Softmaxes, crossfit
from llmaas_eval.prompts.rows import Row
from llmaas_eval.prompts.trained_top import TrainedTop

__all__ = ["LIMITS", "Arm", "Table", "judged", "table_of"]

Values = NDArray[np.float64]
Mask = NDArray[np.bool_]

LIMITS = gap.LIMITS[1:]
"""Limits under which there is something to choose."""
_RANDOM, _GATED = "random", "best of table and heads"
_TRAINED = "trained top"
_PLAIN, _TOP, _OF_KIND = "linear, plain", "linear, top", "linear, top and kind"
_HEADS: Mapping[str, Sequence[str]] = {
    _PLAIN: ("plain",),
    "linear, bottom": ("plain", "bottom"),
    _TOP: ("plain", "kept", "top"),
    _OF_KIND: ("plain", "kept", "top", "kind"),
}
"""Features of each head; all but plain ones take the tiny model's time."""


class Table(NamedTuple):
    """Outcomes of all prompts.

    Attributes:
        is_right: By prompt and setting.
        shares: Shares of prompts.
        levels: Levels of prompts, and of answers.
        features: By where they come from, ``(n, d)`` each.
        halves: Half of each prompt's document.
        kinds: Kind of each prompt.
        documents: Document of each prompt.
    """

    is_right: Mask
    shares: Sequence[float]
    levels: Sequence[float]
    features: Mapping[str, Values]
    halves: NDArray[np.intp]
    kinds: NDArray[np.str_]
    documents: NDArray[np.str_]

    @property
    def settings(self) -> list[Setting]:
        """Settings in the order of the outcomes."""
        return settings(self.shares, self.levels, self.levels)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Numbers of shares, levels of prompts, and levels of answers."""
        return len(self.shares), len(self.levels), len(self.levels)

    def groups(self, names: Sequence[str]) -> list[Values]:
        """Return the features of some places."""
        return [self.features[name] for name in names]


class Arm(NamedTuple):
    """Quality that an arm reached under a limit.

    Attributes:
        arm: Its name.
        limits: Limits of both times in percent.
        seconds: Time of the tiny model, as a share of the whole model's time to the first token.
        quality: Whether each prompt's answer is right, by prompt; or its expected value.
    """

    arm: str
    limits: tuple[int, int]
    seconds: float
    quality: Values


def judged(
    table: Table,
    cost: Mapping[float, Cost],
    seconds: Sequence[float],
    top: TrainedTop | None = None,
) -> list[Arm]:
    """Return what each arm reaches; it learned from the other half of the documents.

    Args:
        table: Outcomes of all prompts.
        cost: Costs of levels.
        seconds: Times of the tiny model, as shares of the whole model's time to the first token.
            One counts where words are chosen, and for arms that use the tiny model's features.
        top: The tiny model's own decision top, which takes minutes to learn; None leaves it out.
    """
    found: dict[tuple[str, tuple[int, int], float], Values] = {}
    for half in np.unique(table.halves):
        is_judged = table.halves == half
        choice = _Choice(table, cost, np.flatnonzero(~is_judged), top)
        for one in itertools.chain.from_iterable(map(choice.arms, seconds)):
            place = found.setdefault(one[:3], np.zeros(len(is_judged)))
            place[is_judged] = one.quality[is_judged]
    return [Arm(*name, quality) for name, quality in found.items()]


def table_of(rows: Sequence[Row], shares: Sequence[float], levels: Sequence[float]) -> Table:
    """Return the rows of the measured prompts as arrays."""
    names = [name for name in rows[0]["features"] if name != "ids"]
    features = {name: np.array([row["features"][name] for row in rows]) for name in names}
    kinds = [row["kind"] for row in rows]
    return Table(
        np.array([np.ravel(row["is_right"]) for row in rows], np.bool_),
        shares,
        levels,
        features | {"kind": _one_hot(kinds)},
        np.array([row["half"] for row in rows]),
        np.array(kinds),
        np.array([row["document"] for row in rows]),
    )


# -- inside --------------------------------------------------------------------------------------


class _Choice:
    """Choices for all prompts by arms that learned from some of them."""

    def __init__(
        self,
        table: Table,
        cost: Mapping[float, Cost],
        learn: NDArray[np.intp],
        top: TrainedTop | None,
    ) -> None:
        self._table, self._cost, self._learn = table, cost, learn
        self._right = table.is_right.astype(np.float64)
        self._heads = {name: self._chances(of) for name, of in _HEADS.items()}
        self._top = None if top is None else self._of_top(top)

    def arms(self, seconds: float) -> Iterator[Arm]:
        """Yield what each arm reaches for all prompts."""
        masks = [self._masks(limits, seconds) for limits in LIMITS]
        paper = self._softmaxes([encoded for _, encoded in masks])
        for at, (limits, (table, encoded)) in enumerate(zip(LIMITS, masks, strict=True)):
            constant = self._best(table, self._learn)
            one_level = self._best(table & self._is_level, self._learn)
            picks = {
                CONSTANT: constant,
                BY_KIND: self._by_kind(table),
                ONE_LEVEL: one_level,
                PAPER: _most(paper[:, at], encoded & self._is_level, one_level),
            }
            best, most = constant, self._picked(constant)[self._learn].mean()
            for name, fit in self._heads.items():
                mask = table if name == _PLAIN else encoded
                picks[name] = _most(fit.outer, mask, constant)
                inner = _most(fit.inner, mask, constant[self._learn])
                reached = self._right[self._learn, inner].mean()
                if name != _OF_KIND and reached > most:
                    best, most = picks[name], reached
            if self._top is not None:
                picks[_TRAINED] = _most(self._top, encoded, constant)
            picks[_GATED] = best
            yield Arm(_RANDOM, limits, seconds, self._right[:, table].mean(axis=1))
            for name, some in picks.items():
                yield Arm(name, limits, seconds, self._picked(some))
            yield Arm(ORACLE, limits, seconds, self._right[:, table].max(axis=1))

    @property
    def _is_level(self) -> Mask:
        """Settings with one level for prompt and answer, as the paper's are."""
        return np.array([one.prefill == one.decode for one in self._table.settings])

    def _masks(self, limits: tuple[int, int], seconds: float) -> tuple[Mask, Mask]:
        """Return the settings within limits, without and with the tiny model for all prompts."""
        ttft, tpot = (limit / 100 for limit in limits)
        some, cost = self._table.settings, self._cost
        table = feasible(some, cost, (ttft, tpot), seconds)
        return table, feasible(some, cost, (ttft - seconds, tpot))

    def _best(self, mask: Mask, rows: NDArray[np.intp]) -> NDArray[np.intp]:
        """Return for all prompts the setting that is best on rows; the first of equal ones."""
        means = np.where(mask, self._right[rows].mean(axis=0), -1.0)
        return np.full(len(self._right), means.argmax())

    def _by_kind(self, mask: Mask) -> NDArray[np.intp]:
        found, kinds = self._best(mask, self._learn), self._table.kinds
        for kind in np.unique(kinds):
            rows = self._learn[kinds[self._learn] == kind]
            if len(rows):
                found[kinds == kind] = self._best(mask, rows)[kinds == kind]
        return found

    def _picked(self, picks: NDArray[np.intp]) -> Values:
        return np.asarray(self._right[np.arange(len(picks)), picks])

    def _chances(self, names: Sequence[str]) -> Fit:
        table = self._table
        head = Chances(table.groups(names), table.is_right, table.shape)
        return crossfit(head, self._learn, table.documents)

    def _of_top(self, top: TrainedTop) -> Values:
        others = np.setdiff1d(np.arange(len(self._right)), self._learn)
        found = np.zeros_like(self._right)
        found[others] = top.told(self._learn, others)
        return found

    def _softmaxes(self, masks: Sequence[Mask]) -> Values:
        """Return what the paper's head tells of settings, ``(n, n_limits, n_settings)``.

        It learns the lightest setting that is right.
        """
        table = self._table
        labels = np.stack([self._labels(mask & self._is_level) for mask in masks], axis=1)
        promises = np.concatenate([_one_hot([one[i] for one in LIMITS]) for i in range(2)], axis=1)
        shape = len(table.shares), len(table.levels)
        head = Softmaxes(table.groups(_HEADS[_TOP]), promises, labels, shape)
        found = crossfit(head, self._learn, table.documents).outer
        share, level, _ = np.unravel_index(np.arange(len(table.settings)), table.shape)
        return np.asarray(found[:, :, share, level])

    def _labels(self, mask: Mask) -> NDArray[np.intp]:
        """Return share and level of the fastest right setting; of the best one where none is."""
        table = self._table
        light = np.array([
            one.share * self._cost[one.prefill].prefill + self._cost[one.decode].decode
            for one in table.settings
        ])  # fmt: skip
        costs = np.where(table.is_right & mask, light, np.inf)
        is_any = np.isfinite(costs).any(axis=1)
        picks = np.where(is_any, costs.argmin(axis=1), self._best(mask, self._learn))
        share, level, _ = np.unravel_index(picks, table.shape)
        return np.stack([share, level], axis=1)


def _most(values: Values, mask: Mask, instead: NDArray[np.intp]) -> NDArray[np.intp]:
    """Return the allowed setting of the largest value: a promise cannot be missed.

    The paper's check at run time takes a random setting instead of one that misses the promise.

    Args:
        values: Values by prompt and setting.
        mask: Allowed settings.
        instead: Settings if none is allowed, as the tiny model takes too long.
    """
    return np.asarray(np.where(mask, values, -1.0).argmax(axis=1)) if mask.any() else instead


def _one_hot(values: Sequence[Any]) -> Values:
    names = sorted(set(values))
    return np.array([[float(value == name) for name in names] for value in values])

"""Shares of answers that each design, and each way to choose, keeps under limits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmaas_eval.prompts.gap import LIMITS, Cost, Setting, feasible, settings
from llmaas_eval.prompts.rows import Row
from llmaas_eval.tables import NoRowsError

__all__ = [
    "ALL_LIMITS",
    "ENCODER_SECONDS",
    "FINE",
    "LEVELS",
    "NO_ORDER",
    "NO_RECOVERY",
    "NO_SCORES",
    "SHARES",
    "STEPS",
    "STEP_SIZES",
    "WHOLE",
    "Outcomes",
    "costs_of",
    "in_part",
    "in_steps",
    "limited",
    "mean_of_possible",
    "parts",
    "steps",
    "strategies",
]

Values = NDArray[np.float64]
Mask = NDArray[np.bool_]

ENCODER_SECONDS = 0.03
"""Time of the tiny model, as a share of the whole model's time to the first token."""
SHARES, LEVELS = (1.0, 0.7, 0.5, 0.3), (1.0, 0.8, 0.7, 0.5, 0.3, 0.2)
"""Shares and levels with each design; prompts and answers have levels of their own."""
FINE = tuple(n / 20 for n in range(20, 3, -1))
"""Shares and levels in steps of 5 %."""
WHOLE, NO_SCORES, NO_RECOVERY, NO_ORDER = "all", "score head", "recovery", "reordering"
"""Designs by the part that is missing."""
STEPS = "steps"
"""The design of the outcomes in steps of 5 %."""
STEP_SIZES = (20, 10, 5)
"""Steps of shares and levels in percent."""


class Outcomes(NamedTuple):
    """Outcomes of prompts with a design.

    Attributes:
        right: Whether the answer stays, by prompt and setting.
        some: The settings.
        halves: Half of each prompt's document.
        kinds: Kind of each prompt.
        documents: Document of each prompt.
    """

    right: Values
    some: Sequence[Setting]
    halves: NDArray[np.intp]
    kinds: NDArray[np.str_]
    documents: NDArray[np.str_]

    def constant(self, mask: Mask) -> Values | None:
        """Return what each prompt reaches with the best setting of the other half's prompts.

        None if no setting is allowed.
        """
        return self._constant(mask, np.zeros_like(self.halves)) if mask.any() else None

    def by_kind(self, mask: Mask) -> Values | None:
        """Return the same with a setting for each kind of prompts."""
        _, kinds = np.unique(self.kinds, return_inverse=True)
        return self._constant(mask, kinds) if mask.any() else None

    def random(self, mask: Mask) -> Values | None:
        """Return the mean of all allowed settings for each prompt."""
        return self.right[:, mask].mean(axis=1) if mask.any() else None

    def oracle(self, mask: Mask) -> Values | None:
        """Return what each prompt reaches with its own best setting."""
        return self.right[:, mask].max(axis=1) if mask.any() else None

    def first(self, mask: Mask, order: Callable[[Setting], tuple[float, float]]) -> Values | None:
        """Return what each prompt reaches with the allowed setting that an order puts last."""
        allowed = np.flatnonzero(mask).tolist()
        if not allowed:
            return None
        return self.right[:, max(allowed, key=lambda at: order(self.some[at]))]

    def _constant(self, mask: Mask, groups: NDArray[np.intp]) -> Values:
        found = np.empty(len(self.right))
        for group in np.unique(groups):
            for half in np.unique(self.halves):
                mine = (groups == group) & (self.halves == half)
                others = (groups == group) & (self.halves != half)
                judges = others if others.any() else self.halves != half
                means = np.where(mask, self.right[judges].mean(axis=0), -1.0)
                found[mine] = self.right[mine, means.argmax()]
        return found


def costs_of(pairs: Sequence[tuple[float, Sequence[float]]]) -> Mapping[float, Cost]:
    """Return the costs of levels in steps of 5 %; those between measured ones are interpolated."""
    levels = [level for level, _ in reversed(pairs)]
    found = [np.interp(FINE, levels, [one[i] for _, one in reversed(pairs)]) for i in range(2)]
    return {level: Cost(*both) for level, *both in zip(FINE, *found, strict=True)}


def in_part(rows: Sequence[Row], design: str) -> Outcomes:
    """Return the outcomes of a design; prompts and answers have levels of their own."""
    return _of([row for row in rows if row["design"] == design], settings(SHARES, LEVELS, LEVELS))


def in_steps(rows: Sequence[Row]) -> Outcomes:
    """Return the outcomes in steps of 5 %; prompts and answers have one level."""
    some = [Setting(share, level, level) for share in FINE for level in FINE]
    return _of([row for row in rows if row["design"] == STEPS], some)


def limited(of: Outcomes, cost: Mapping[float, Cost], limits: tuple[int, int]) -> Mask:
    """Return which settings keep limits in percent, with the tiny model's time."""
    return feasible(of.some, cost, (limits[0] / 100, limits[1] / 100), ENCODER_SECONDS)


def parts(
    rows: Sequence[Row], cost: Mapping[float, Cost], limits: tuple[int, int]
) -> Mapping[str, Values | None]:
    """Return what the whole design reaches under limits, and that without each part."""
    whole, designs = in_part(rows, WHOLE), {row["design"] for row in rows}
    others = [name for name in (NO_SCORES, NO_RECOVERY, NO_ORDER) if name in designs]
    mask = limited(whole, cost, limits)
    is_level = np.array([one.prefill == one.decode for one in whole.some])
    is_whole = np.array([one.share == 1 for one in whole.some])
    return {
        WHOLE: whole.constant(mask),
        **{name: in_part(rows, name).constant(mask) for name in others},
        "decision": whole.random(mask),
        "separate levels": whole.constant(mask & is_level),
        "shorter prompts": whole.constant(mask & is_whole),
    }


def steps(
    rows: Sequence[Row], cost: Mapping[float, Cost], limits: tuple[int, int]
) -> Mapping[int, tuple[Values | None, Values | None]]:
    """Return the best constant and the oracle under limits by step size in percent."""
    of = in_steps(rows)
    mask, found = limited(of, cost, limits), {}
    for size in STEP_SIZES:
        fits = [_is_step(one.share, size) and _is_step(one.prefill, size) for one in of.some]
        some = mask & np.array(fits)
        found[size] = of.constant(some), of.oracle(some)
    return found


def strategies(
    rows: Sequence[Row], cost: Mapping[float, Cost], limits: tuple[int, int]
) -> Mapping[str, Values | None]:
    """Return what strategies reach under limits, in steps of 10 % (Fig 4b)."""
    of = in_steps(rows)
    fits = [_is_step(one.share, 10) and _is_step(one.prefill, 10) for one in of.some]
    mask = limited(of, cost, limits) & np.array(fits)
    return {
        "random": of.random(mask),
        "widest model, then most of the prompt": of.first(
            mask, lambda one: (one.prefill, one.share)
        ),
        "most of the prompt, then widest model": of.first(
            mask, lambda one: (one.share, one.prefill)
        ),
        "best constant": of.constant(mask),
        "best by kind": of.by_kind(mask),
        "oracle": of.oracle(mask),
    }


ALL_LIMITS = LIMITS[1:]
"""Limits under which there is something to choose."""


def mean_of_possible(values: Iterable[Values | None]) -> Values:
    """Return the mean of each prompt over the limits that are possible; one of them is."""
    return np.asarray(np.mean([one for one in values if one is not None], axis=0), np.float64)


# -- inside --------------------------------------------------------------------------------------


def _is_step(value: float, size: int) -> bool:
    return round(100 * value) % size == 0


def _of(rows: Sequence[Row], some: Sequence[Setting]) -> Outcomes:
    if not rows:
        raise NoRowsError("no prompts were asked")
    rows = sorted(rows, key=lambda row: row["number"])
    right = [np.ravel(row["is_right"]) for row in rows]
    return Outcomes(
        np.array(right, np.float64),
        some,
        np.array([row["half"] for row in rows]),
        np.array([row["kind"] for row in rows]),
        np.array([row["document"] for row in rows]),
    )

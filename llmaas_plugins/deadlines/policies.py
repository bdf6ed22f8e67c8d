"""Certificates of a risk: settings whose answers rarely differ from the whole model's.

A policy is a prefill level, and a decode level for each margin of the first token. Learn then test
([2110.01052](https://arxiv.org/abs/2110.01052), fixed sequences): policies are ordered from safe to
risky before the calibration requests are looked at, and tested in this order until one fails. There
are two orders for each prefill level, which share the probability of an error equally. So all
policies that passed hold together, whichever is used.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmaas_plugins.deadlines.answers import Answers
from llmaas_plugins.deadlines.binomial import most_found, upper_bound
from llmaas_plugins.deadlines.worth import Margins

__all__ = ["WHOLE", "Policy", "certified"]

_RISKS = (*(0.5 * (i / 40) ** 2 for i in range(41)), 1.0)
"""Estimated risks up to which a margin allows a level, from safe to risky policies."""
_N_ORDERS = 2


class Policy(NamedTuple):
    """Levels to use, the answer's by the margin of the first token.

    Attributes:
        prefill: Level of the prompt.
        edges: Margins between ranges, ascending.
        decode: Level of the answer for each range of margins.
        worth: Estimated probability of the whole model's answer for each range.
        shares: Share of the calibration requests in each range.
        risk: Bound of the probability of another answer than the whole model's.
    """

    prefill: float
    edges: tuple[float, ...]
    decode: tuple[float, ...]
    worth: tuple[float, ...]
    shares: tuple[float, ...]
    risk: float

    def range_of(self, margin: float) -> int:
        """Return the index of a margin's range."""
        return int(np.searchsorted(self.edges, margin))


WHOLE = Policy(1.0, (), (1.0,), (1.0,), (1.0,), 0.0)
"""The whole model, which needs no certificate."""


def certified(
    fitting: Answers, calibration: Answers, n_tokens: int, max_risk: float, error: float
) -> tuple[Policy, ...]:
    """Return the policies whose risk is certified, and the whole model.

    Args:
        fitting: Answers from which the risk at each margin is estimated.
        calibration: Answers to other requests, from which risks are certified.
        n_tokens: Tokens of an answer that must not differ.
        max_risk: Largest probability of another answer, above 0 and below 1.
        error: Probability that any of the certificates is wrong.
    """
    levels, found = calibration.levels, [WHOLE]
    share = error / (_N_ORDERS * len(levels))
    most = most_found(len(calibration), max_risk, share)
    differ = calibration.differ(n_tokens)
    for prefill in range(len(levels)):
        margins = Margins.of(fitting, prefill, n_tokens)
        ranges = np.searchsorted(margins.edges, calibration.margins[:, prefill])
        known = _Known(levels[prefill], levels, margins, ranges)
        for order in (_constant(margins.risks), _by_margin(margins.risks)):
            for decode in order:
                n_differ = int(differ[np.arange(len(differ)), prefill, decode[ranges]].sum())
                if n_differ > most:
                    break
                risk = upper_bound(n_differ, len(calibration), share)
                found.append(known.policy(decode, risk))
    return tuple(found)


# -- inside --------------------------------------------------------------------------------------

_Decode = NDArray[np.intp]
"""Index of the decode level for each range of margins."""


class _Known(NamedTuple):
    """Knowledge about a prefill level.

    Attributes:
        prefill: The level.
        levels: All levels, widest first.
        margins: Estimated risks.
        ranges: Range of margins of each calibration request; ``(n,)``.
    """

    prefill: float
    levels: Sequence[float]
    margins: Margins
    ranges: NDArray[np.intp]

    def policy(self, decode: _Decode, risk: float) -> Policy:
        """Return a policy with its bound of the risk."""
        n = len(decode)
        return Policy(
            self.prefill,
            tuple(self.margins.edges.tolist()),
            tuple(self.levels[i] for i in decode),
            tuple((1 - self.margins.risks[decode, np.arange(n)]).tolist()),
            tuple((np.bincount(self.ranges, minlength=n) / len(self.ranges)).tolist()),
            risk,
        )


def _constant(risks: NDArray[np.float64]) -> Iterator[_Decode]:
    """Yield policies that use the same decode level for each margin."""
    n_levels, n_ranges = risks.shape
    for level in range(n_levels):
        yield np.full(n_ranges, level)


def _by_margin(risks: NDArray[np.float64]) -> Iterator[_Decode]:
    """Yield policies that use the narrowest level whose estimated risk is small enough."""
    last = np.empty(0, np.intp)
    for most in _RISKS:
        found = np.maximum((risks <= most).sum(axis=0) - 1, 0)
        if not np.array_equal(found, last):
            yield found
        last = found

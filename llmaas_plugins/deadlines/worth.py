"""Probability that a pair of levels gives the whole model's answer."""

from __future__ import annotations

from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from llmaas_plugins.deadlines.answers import Answers
from llmaas_plugins.deadlines.isotonic import rising, rising_grid

__all__ = ["Margins", "Worth"]

_N_LENGTHS, _LEAST = 3, 100
"""Most ranges of prompt lengths, and fewest requests of one."""
_N_BINS = 12
"""Most ranges of margins."""


class Worth(NamedTuple):
    """Probability of the whole model's answer, by prompt length; it rises with both levels.

    Attributes:
        levels: Levels, widest first.
        lengths: Largest numbers of prompt tokens of all ranges but the last; ascending.
        shares: Probabilities; ``(n_ranges, n_levels, n_levels)``, prefill before decode.
    """

    levels: tuple[float, ...]
    lengths: NDArray[np.float64]
    shares: NDArray[np.float64]

    @classmethod
    def of(cls, answers: Answers, n_tokens: int) -> Self:
        """Estimate the probabilities for the first tokens of an answer."""
        n_ranges = max(min(len(answers) // _LEAST, _N_LENGTHS), 1)
        lengths = _quantiles(answers.n_prompt, n_ranges)
        ranges = np.searchsorted(lengths, answers.n_prompt)
        differ = answers.differ(n_tokens)
        shares = [
            1 - rising_grid(differ[ranges == i].mean(axis=0)) for i in range(len(lengths) + 1)
        ]
        return cls(answers.levels, lengths, np.stack(shares))

    def at(self, prefill: float, decode: float, n_prompt: int) -> float | None:
        """Return the probability of a pair of levels; None if one is not in the table."""
        if prefill not in self.levels or decode not in self.levels:
            return None
        pair = self.levels.index(prefill), self.levels.index(decode)
        return float(self.shares[(int(np.searchsorted(self.lengths, n_prompt)), *pair)])


class Margins(NamedTuple):
    """Probability of another answer than the whole model's, by the first token's margin.

    It falls with the margin, and with the decode level.

    Attributes:
        edges: Margins between the ranges, ascending; ``(n_ranges - 1,)``.
        risks: Probabilities; ``(n_levels, n_ranges)``, by decode level.
    """

    edges: NDArray[np.float64]
    risks: NDArray[np.float64]

    @classmethod
    def of(cls, answers: Answers, prefill: int, n_tokens: int) -> Self:
        """Estimate the probabilities for the prefill level of an index."""
        margins = answers.margins[:, prefill]
        edges = _quantiles(margins, _N_BINS)
        ranges, n = np.searchsorted(edges, margins), len(edges) + 1
        counts = np.bincount(ranges, minlength=n).astype(np.float64)
        differ = answers.differ(n_tokens)[:, prefill]
        sums = np.stack([np.bincount(ranges, one, n) for one in differ.T])
        falling = [rising(row[::-1], counts[::-1])[::-1] for row in sums / counts]
        return cls(edges, np.maximum.accumulate(np.stack(falling), axis=0))


def _quantiles(values: NDArray[Any], n: int) -> NDArray[np.float64]:
    """Return different values between about equal numbers of values; each range has some."""
    found = np.quantile(values, np.arange(1, n) / n, method="lower").astype(np.float64)
    return np.unique(found[found < values.max()])

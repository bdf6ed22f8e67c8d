"""Probability that a setting gives the whole model's answer to the whole prompt."""

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
    """Probability of the whole model's answer, by prompt length; it never falls as a knob rises.

    Attributes:
        levels: Levels, widest first.
        lengths: Largest numbers of prompt tokens of all ranges but the last; ascending.
        whole: Probabilities of whole prompts; ``(n_ranges, n_levels, n_levels)``, prefill before
            decode.
        shares: Shares of shorter prompts that were measured, longest first.
        measured: Levels at which shorter prompts were measured, widest first.
        shorter: Probabilities of shorter prompts; ``(n_ranges, n_shares, n_measured, n_measured)``.
        chosen_by: Name of how the words of shorter prompts were chosen.
    """

    levels: tuple[float, ...]
    lengths: NDArray[np.float64]
    whole: NDArray[np.float64]
    shares: tuple[float, ...]
    measured: tuple[float, ...]
    shorter: NDArray[np.float64]
    chosen_by: str = ""

    @classmethod
    def of(cls, answers: Answers, n_tokens: int) -> Self:
        """Estimate the probabilities for the first tokens of an answer."""
        n_ranges = max(min(len(answers) // _LEAST, _N_LENGTHS), 1)
        lengths = _quantiles(answers.n_prompt, n_ranges)
        rows = np.searchsorted(lengths, answers.n_prompt) == np.arange(len(lengths) + 1)[:, None]
        whole = _agreement(answers.leads, rows, n_tokens)
        if answers.shorter is None:
            return cls(answers.levels, lengths, whole, (), (), np.empty((len(rows), 0, 0, 0)))
        shares, levels, leads, chosen_by = answers.shorter
        # no part of a prompt is worth more than the whole
        places = [answers.levels.index(level) for level in levels]
        most = whole[:, places][:, :, places]
        shorter = np.minimum(_agreement(leads, rows, n_tokens), most[:, None])
        return cls(answers.levels, lengths, whole, shares, levels, shorter, chosen_by)

    def known_of(self, chosen_by: str | None) -> Self:
        """Return what is known if words are chosen so: of other words, nothing is known."""
        return self if chosen_by in (None, self.chosen_by) else self._replace(shares=())

    def at(self, prefill: float, decode: float, n_prompt: int, share: float = 1.0) -> float | None:
        """Return the probability of a setting; None if it is not in the table.

        A setting of a shorter prompt that was not measured is worth as much, at least, as the next
        one below that was.

        Args:
            prefill: Level of the prompt.
            decode: Level of the answer.
            n_prompt: Number of tokens of the whole prompt.
            share: Share of them that is read.
        """
        if prefill not in self.levels or decode not in self.levels:
            return None
        length = int(np.searchsorted(self.lengths, n_prompt))
        if share == 1:
            pair = self.levels.index(prefill), self.levels.index(decode)
            return float(self.whole[(length, *pair)])
        if not self.shares or share < self.shares[-1]:
            return None
        knobs = (share, self.shares), (prefill, self.measured), (decode, self.measured)
        return float(self.shorter[(length, *(_below(*knob) for knob in knobs))])


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


def _agreement(
    leads: NDArray[np.uint8], rows: NDArray[np.bool_], n_tokens: int
) -> NDArray[np.float64]:
    """Return the probability of the whole model's first tokens, for each of some sets of rows."""
    differ = leads < n_tokens
    return np.stack([1 - rising_grid(differ[one].mean(axis=0)) for one in rows])


def _below(value: float, found: tuple[float, ...]) -> int:
    """Return the index of the largest value that is not above another; they are falling."""
    return next(i for i, one in enumerate(found) if one <= value)


def _quantiles(values: NDArray[Any], n: int) -> NDArray[np.float64]:
    """Return different values between about equal numbers of values; each range has some."""
    found = np.quantile(values, np.arange(1, n) / n, method="lower").astype(np.float64)
    return np.unique(found[found < values.max()])

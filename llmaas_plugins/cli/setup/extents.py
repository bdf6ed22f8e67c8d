"""How much the steps of ``llmaas setup`` evaluate: less of a large model, so that none takes days.

The numbers depend on the model alone, so a step stays the same when a stopped command goes on.
"""

from __future__ import annotations

import functools
import math
from itertools import pairwise
from pathlib import Path

from llmaas_plugins.cli.models import trained_context
from llmaas_plugins.machine import usable_processors
from llmaas_plugins.model.gguf_header import read_header

__all__ = ["Extents"]

_REQUESTS = 32, 96
"""Fewest and most prompts of the first outcome table."""
_MORE_REQUESTS = 4
"""Prompts of the table that follows, relative to the first one's, if the first has fewer."""
_COMPARED = 750
"""Tokens of all levels together that comparing the answers to a prompt evaluates."""
_FULL_REQUESTS = 1000
_MOST_WORK = 1.5e14
"""Parameters of a model times tokens to evaluate in a step: about half an hour on two cores."""
_LENGTHS, _FEW_LENGTHS = (32, 64, 128, 256, 512), (32, 512)
"""Lengths of prompts to time, and those of a model of which all would take too long."""
_LEVELS = 5.4
"""Sum of the nine levels."""
_RUNS = 6
"""Runs of each length at each level: three times, with two numbers of threads."""
_TIMED = 8
"""Tokens after a prompt that are timed."""
_ALONE = 12
"""Time of a token that is evaluated alone, relative to one of a prompt."""
_RECOVERED = 4e13
"""Parameters of a model times tokens to learn from: two hours for all levels on two cores."""
_RECOVERED_S = 3.6e-10
"""Seconds of one processor for each parameter and token."""
_MOST_PROCESSORS = 8
"""Processors by which that time is divided at most: two were measured, and many wait for memory."""
_TOKENS = 1 << 13, 1 << 18
"""Fewest and most tokens that adapters learn from."""
_BYTES = 4
"""Characters of a chat, or bytes of an export, for each token."""


class Extents:
    """How much the steps for a model evaluate."""

    def __init__(self, model: Path, digest: str) -> None:
        """Read the header of a model, unless that was done for this digest before.

        Raises:
            StoreError: The model cannot be read.
        """
        self._n_parameters, self._n_trained = _read(model, digest)

    @property
    def n_requests(self) -> int:
        """Prompts of the first outcome table."""
        least, most = _REQUESTS
        return _power_of_2(_MOST_WORK / _COMPARED / self._n_parameters, least, most)

    @property
    def has_few_requests(self) -> bool:
        """Whether these are fewer than for a small model."""
        return self.n_requests < _REQUESTS[1]

    @property
    def n_more_requests(self) -> int | None:
        """Prompts of the second outcome table; None leaves it to the command."""
        return _MORE_REQUESTS * self.n_requests if self.has_few_requests else None

    @property
    def lengths(self) -> tuple[int, ...]:
        """Lengths of prompts to time, none longer than those with which the model was trained."""
        trained = tuple(n for n in _LENGTHS if n <= self._n_trained)
        return _FEW_LENGTHS if self.has_few_lengths else trained

    @property
    def has_few_lengths(self) -> bool:
        """Whether these are fewer than for a small model that was trained with as long prompts."""
        if self._n_trained < _LENGTHS[-1]:
            return False
        return self._n_parameters * self._n_profiled(_LENGTHS) > _MOST_WORK

    @property
    def are_lengths_usual(self) -> bool:
        """Whether the lengths are those that the command times by itself."""
        return self.lengths == _LENGTHS

    def n_characters(self, n_bytes: int) -> int | None:
        """Return how many characters of chats to read, or None for all of exports of this size."""
        n_tokens = _power_of_2(_MOST_WORK / self._n_parameters, 1, 1 << 40)
        return _BYTES * n_tokens if n_bytes > _BYTES * n_tokens else None

    @property
    def n_recovered(self) -> int:
        """Tokens from which adapters learn."""
        return _power_of_2(_RECOVERED / self._n_parameters, *_TOKENS)

    # -- times -----------------------------------------------------------------------------------

    def profiling_s(self, read_s: float) -> float:
        """Return about how many seconds the timing takes, if a token of a prompt takes so many."""
        return read_s * self._n_profiled(self.lengths)

    def learning_s(self, read_s: float) -> float:
        """Return about how many seconds the first outcome table takes."""
        return read_s * _COMPARED * self.n_requests

    def learning_more_s(self, read_s: float) -> float:
        """Return about how many seconds the second outcome table takes."""
        return read_s * _COMPARED * (self.n_more_requests or _FULL_REQUESTS)

    def reading_s(self, read_s: float, n_bytes: int) -> float:
        """Return about how many seconds reading chats takes whose exports have ``n_bytes``."""
        return read_s * (self.n_characters(n_bytes) or n_bytes) / _BYTES

    def recovering_s(self) -> float:
        """Return about how many seconds adapters take to learn with this machine's processors."""
        work_s = _RECOVERED_S * self._n_parameters * self.n_recovered
        return work_s / min(usable_processors(), _MOST_PROCESSORS)

    # -- inside ----------------------------------------------------------------------------------

    @staticmethod
    def _n_profiled(lengths: tuple[int, ...]) -> float:
        """Return the time of timing all levels, in tokens of the whole model's prompts."""
        all_ = [*lengths, *(math.sqrt(a * b) for a, b in pairwise(lengths))]
        return _LEVELS * _RUNS * (sum(all_) + _ALONE * _TIMED * len(all_))


def _power_of_2(most_fitting: float, least: int, most: int) -> int:
    """Return the largest power of 2 up to a number, within limits."""
    return min(most, max(least, 1 << max(0, int(most_fitting).bit_length() - 1)))


@functools.cache
def _read(model: Path, digest: str) -> tuple[int, int]:
    """Return the number of parameters of the model with this digest, and its longest prompt.

    The header is read once: that of a model with a large vocabulary takes a while.
    """
    del digest
    tensors = read_header(model).tensors.values()
    n_parameters = max(1, sum(one.n_rows * one.n_columns for one in tensors))  # 0 in a vocabulary
    return n_parameters, trained_context(model) or _LENGTHS[-1]

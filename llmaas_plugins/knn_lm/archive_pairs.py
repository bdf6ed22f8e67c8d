"""Any of the archive's pairs by number, and nothing else read but what was asked for."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from llmaas_plugins.knn_lm.archive_record import COLUMNS
from llmaas_plugins.knn_lm.pairs import Pairs
from llmaas_plugins.knn_lm.segments import Segment, Stored

__all__ = ["Columns", "Origin", "PairTable"]


class Columns(NamedTuple):
    """Pairs without their keys, one a row."""

    values: npt.NDArray[np.int32]
    p_lm: npt.NDArray[np.float32]
    p_max: npt.NDArray[np.float32]


class Origin(NamedTuple):
    """Where pairs come from: conversations' numbers, and where in their tokens the target is."""

    numbers: npt.NDArray[np.int32]
    positions: npt.NDArray[np.int32]


class PairTable:
    """The pairs of some records, numbered in their order.

    Keys are read, not mapped: mapped ones would count as this process's memory, and a file that is
    cut short meanwhile would end it. Columns stay in RAM, 20 bytes a pair.
    """

    def __init__(self, places: Sequence[tuple[Segment, Stored]], n_embd: int) -> None:
        """Count them; nothing is read yet."""
        self._places = places
        self._n_embd = n_embd
        self._ends = np.cumsum([0, *(stored.header.n_pairs for _, stored in places)])

    def __len__(self) -> int:
        """How many pairs."""
        return int(self._ends[-1])

    def columns(self) -> Columns:
        """All pairs without their keys."""
        table, values = self._columns
        return Columns(values.copy(), table["p_lm"].copy(), table["p_max"].copy())

    def origin(self, indices: npt.NDArray[np.integer]) -> Origin:
        """Where these pairs come from."""
        wanted = self._checked(indices)
        numbers = np.array([stored.header.number for _, stored in self._places], np.int32)
        return Origin(numbers[self._record_of(wanted)], self._columns[0]["position"][wanted])

    def pairs(self, indices: npt.NDArray[np.integer]) -> Pairs:
        """These pairs, in this order."""
        wanted = self._checked(indices)
        table, values = self._columns
        keys = self._keys(wanted, table["key_sum"])
        found = table[wanted]
        return Pairs(keys, values[wanted], found["p_lm"].copy(), found["p_max"].copy())

    @functools.cached_property
    def _columns(self) -> tuple[npt.NDArray[np.void], npt.NDArray[np.int32]]:
        columns = [segment.columns(stored) for segment, stored in self._places]
        values = [
            segment.tokens(stored)[own["position"]]
            for (segment, stored), own in zip(self._places, columns, strict=True)
        ]
        none = np.empty(0, COLUMNS)
        return np.concatenate([none, *columns]), np.concatenate([none["position"], *values])

    def _keys(
        self, wanted: npt.NDArray[np.int64], sums: npt.NDArray[np.uint32]
    ) -> npt.NDArray[np.float16]:
        keys = np.empty((len(wanted), self._n_embd), np.float16)
        order = np.argsort(wanted, kind="stable")
        rows = wanted[order]
        edges = np.searchsorted(rows, self._ends)
        for i in np.flatnonzero(np.diff(edges)).tolist():
            part = slice(edges[i], edges[i + 1])
            segment, stored = self._places[i]
            own = rows[part] - self._ends[i]
            keys[order[part]] = segment.keys(stored, own, sums[rows[part]])
        return keys

    def _record_of(self, wanted: npt.NDArray[np.int64]) -> npt.NDArray[np.intp]:
        return np.searchsorted(self._ends, wanted, side="right") - 1

    def _checked(self, indices: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
        wanted = np.asarray(indices, np.int64)
        if wanted.ndim != 1 or (len(wanted) and not 0 <= wanted.min() <= wanted.max() < len(self)):
            raise IndexError(f"expected a list of pair numbers from 0 to {len(self) - 1}")
        return wanted

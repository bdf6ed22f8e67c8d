"""Access to the archive's pairs by number; only the requested keys are read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from llmaas_plugins.knn_lm.archive.pairs import Pairs
from llmaas_plugins.knn_lm.archive.record import COLUMNS
from llmaas_plugins.knn_lm.archive.segments import ArchiveSegment, StoredRecord
from llmaas_plugins.lazy import lazy

__all__ = ["Columns", "Origin", "PairTable"]


class Columns(NamedTuple):
    """Targets and probabilities of pairs, one pair a row."""

    values: npt.NDArray[np.int32]
    p_lm: npt.NDArray[np.float32]
    p_max: npt.NDArray[np.float32]


class Origin(NamedTuple):
    """Conversation number of each pair, and position of its target in the conversation."""

    numbers: npt.NDArray[np.int32]
    positions: npt.NDArray[np.int32]


class PairTable:
    """The pairs of some records, numbered in the records' order.

    Keys are read, not mapped. Mapped keys would count as memory of this process, and truncating the
    file would kill the process. The other columns stay in RAM, 20 bytes a pair.
    """

    def __init__(self, places: Sequence[tuple[ArchiveSegment, StoredRecord]], n_embd: int) -> None:
        """Count the pairs without reading any."""
        self._places = places
        self._n_embd = n_embd
        self._ends = np.cumsum([0, *(stored.header.n_pairs for _, stored in places)])

    def __len__(self) -> int:
        """Return the number of pairs."""
        return int(self._ends[-1])

    def columns(self) -> Columns:
        """Return all pairs without their keys."""
        table, values = self._columns
        return Columns(values.copy(), table["p_lm"].copy(), table["p_max"].copy())

    def origin(self, indices: npt.NDArray[np.integer]) -> Origin:
        """Return where these pairs come from."""
        wanted = self._checked(indices)
        numbers = np.array([stored.header.number for _, stored in self._places], np.int32)
        return Origin(numbers[self._record_of(wanted)], self._columns[0]["position"][wanted])

    def pairs(self, indices: npt.NDArray[np.integer]) -> Pairs:
        """Return these pairs, in this order."""
        wanted = self._checked(indices)
        table, values = self._columns
        keys = self._keys(wanted, table["key_sum"])
        found = table[wanted]
        return Pairs(keys, values[wanted], found["p_lm"].copy(), found["p_max"].copy())

    @lazy
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

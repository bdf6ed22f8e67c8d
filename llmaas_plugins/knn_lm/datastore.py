"""The selected datastore: a byte a number to scan in memory, the keys themselves in a file."""

from __future__ import annotations

import itertools
import math
import os
import weakref
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from llmaas_hooks import StoreError
from llmaas_plugins._native import KNN_MAX_BEST, KnnCodes, NativeError, knn_rescore, knn_scan
from llmaas_plugins.knn_lm.approximate import FaissIndex
from llmaas_plugins.knn_lm.datastore_file import DatastoreFile, damaged
from llmaas_plugins.knn_lm.datastore_text import Text
from llmaas_plugins.knn_lm.datastore_write import read_keys, write_datastore, write_without
from llmaas_plugins.knn_lm.pca import Basis

__all__ = ["Datastore", "IndexKind", "Neighbours"]

_SPARE_ROWS = 16
"""Rows beyond those measured for 100 neighbours: of fewer, each that is lost weighs more."""

IndexKind = Literal["scan", "faiss"]
Ints = NDArray[np.int32]
Floats = NDArray[np.float32]
Keys = NDArray[np.float16] | NDArray[np.float32]

_NO_ROWS: Ints = np.empty(0, np.int32)
_NO_DISTANCES: Floats = np.empty(0, np.float32)


class Neighbours(NamedTuple):
    """The nearest pairs, nearest first.

    Attributes:
        values: Their targets.
        distances: Squared Euclidean distances of their keys.
        weights: For how many pairs of the full datastore each stands.
        rows: Where they are in the datastore.
    """

    values: Ints
    distances: Floats
    weights: Floats
    rows: Ints


_MOST_IN_QUERY = 1e15
"""Beyond, distances to keys that are finite may be none in float32."""


class Datastore:
    """One that is open; several threads may search it."""

    def __init__(self, file: DatastoreFile, kind: IndexKind) -> None:
        """Load all of a file but its keys, and own it.

        Raises:
            StoreError: It is damaged.
            ConfigError: The index cannot be had.
        """
        text = Text.read(file)
        self.conversations = text.conversations
        self.settings = text.settings
        self.values: Ints = file.read("values")
        self.origins: Ints = file.read("origins")
        self.weights: Floats = file.read("weights")
        self._rows_per_neighbour = text.rows_per_neighbour
        self._sums = file.read("sums")
        self._basis = _read_basis(file)
        self._index = _Scan(file) if kind == "scan" else _faiss_index(file, self._basis)
        self._file = file
        self._check_ranges()
        self._runs = _runs(self.origins[:, 0], text.owners)
        weakref.finalize(self, file.close)  # who replaces one cannot know who still searches it

    @classmethod
    def open(cls, path: Path, fingerprint: bytes | None, index: IndexKind = "scan") -> Self:
        """Open a file for the model of this fingerprint, or, if it is ``None``, for any.

        Args:
            path: Its place.
            fingerprint: The model's.
            index: How it is searched: all codes, or about (see ``approximate``).

        Raises:
            StoreError: The file cannot be read, is damaged, or was made for another model.
            ConfigError: The index cannot be had.
        """
        file = DatastoreFile(path)
        try:
            _require_model(file, fingerprint)
            return cls(file, index)
        except BaseException:
            file.close()
            raise

    @staticmethod
    def write(  # noqa: PLR0913 -- what a datastore consists of
        path: Path,
        *,
        fingerprint: bytes,
        keys: Keys,
        values: Ints,
        weights: Floats | None = None,
        origins: Ints,
        conversations: Sequence[str],
        basis: Basis | None,
        settings: Mapping[str, Any],
        owners: Sequence[str | None] | None = None,
    ) -> None:
        """Write a file in place of the one that is there, if any.

        Args:
            path: Its place; its mode is 0600.
            fingerprint: Of the model that the keys are of, 32 bytes.
            keys: Hidden states, shape (n, n_embd).
            values: The tokens that came next.
            weights: For how many pairs each stands, above 0; 1 if left out.
            origins: Of each pair: index of its conversation, and position there; shape (n, 2).
            conversations: Their ids.
            basis: Directions to scan in; in all, if ``None``.
            settings: Anything of plain JSON types; it is given back as it is.
            owners: Of each conversation, the app that alone may be answered with it; None: all.
                A search is fastest where pairs of one owner are neighbours.

        Raises:
            ValueError: The arrays do not fit together, or a key is not finite in float16.
            StoreError: The file cannot be written. The one that was there still is.
        """
        write_datastore(
            path,
            fingerprint=fingerprint,
            keys=keys,
            values=values,
            weights=np.ones(len(values), np.float32) if weights is None else weights,
            origins=origins,
            conversations=conversations,
            basis=basis,
            settings=settings,
            owners=[None] * len(conversations) if owners is None else owners,
        )

    @staticmethod
    def without(path: Path, conversations: Collection[str]) -> int:
        """Write a file again without these conversations, and overwrite the old one with zeros.

        What was computed from all pairs together (basis, centre, steps, settings) stays. Whoever
        has the old one open finds that it is not current, and its keys damaged.

        Returns:
            Pairs that went.

        Raises:
            StoreError: The file cannot be read or written, or is damaged. It still is as it was.
        """
        return write_without(path, conversations)

    def __len__(self) -> int:
        """Pairs."""
        return len(self.values)

    @property
    def n_embd(self) -> int:
        """Numbers in a key."""
        return self._file.counts.n_embd

    @property
    def fingerprint(self) -> bytes:
        """Of the model that the keys are of."""
        return self._file.fingerprint

    @property
    def memory_bytes(self) -> int:
        """Memory that its arrays take."""
        basis = () if self._basis is None else (self._basis.mean, self._basis.axes)
        arrays = (self.values, self.origins, self.weights, self._sums, *basis)
        return self._index.n_bytes + sum(array.nbytes for array in arrays)

    def is_current(self) -> bool:
        """Whether the file at its path still is the one that is open."""
        try:
            return os.path.samestat(os.fstat(self._file.fd), self._file.path.stat())
        except OSError:
            return False

    def ranges_for(self, app: str | None, *, of_all: bool = False) -> tuple[range, ...]:
        """Return the rows that an app may be answered with: its own, and those of no app.

        Args:
            app: Its name; None has none of its own.
            of_all: It may be answered with what belongs to other apps, too.
        """
        if of_all:
            return (range(len(self)),) if len(self) else ()
        return tuple(rows for owner, rows in self._runs if owner is None or owner == app)

    def search(self, query: Floats, k: int, ranges: Sequence[range] | None = None) -> Neighbours:
        """The ``k`` pairs whose keys are nearest to ``query``; fewer where there are fewer.

        Args:
            query: A hidden state.
            k: How many.
            ranges: The rows to search in; all if left out. Others are not looked at.

        Raises:
            ValueError: ``k`` or the query's shape is wrong, or the query is not finite.
            StoreError: A key cannot be read, or is damaged.
        """
        if query.shape != (self.n_embd,) or not 1 <= k <= KNN_MAX_BEST:
            raise ValueError(
                f"search of {k} neighbours of {query.shape}: expected 1 to {KNN_MAX_BEST} of "
                f"{self.n_embd} numbers"
            )
        scanned = query if self._basis is None else self._basis.project(query)
        n_best = min(math.ceil(k * self._rows_per_neighbour) + _SPARE_ROWS, KNN_MAX_BEST)
        ranges = self.ranges_for(None, of_all=True) if ranges is None else ranges
        found = [self._index.nearest(scanned, n_best, within) for within in ranges]
        rows = np.concatenate([_NO_ROWS, *found])
        exact = [self._exact_distances(part, query) for part in found]
        distances = np.concatenate([_NO_DISTANCES, *exact])
        order = np.lexsort((rows, distances))[:k]
        rows = rows[order]
        return Neighbours(self.values[rows], distances[order], self.weights[rows], rows)

    def _exact_distances(self, rows: Ints, query: Floats) -> Floats:
        file = self._file
        try:
            distances = knn_rescore(file.fd, file.keys_at, self._sums, rows, query)
        except NativeError as error:
            raise damaged(file.path, "a damaged key", "the one that was written") from error
        if not np.isfinite(distances).all() and np.abs(query).max() < _MOST_IN_QUERY:
            raise damaged(file.path, "a key that is not finite", "finite ones")
        return distances

    def close(self) -> None:
        """Close the file; more than once is the same as once."""
        self._file.close()

    def _check_ranges(self) -> None:
        """Sums tell damage; this tells a file that somebody else wrote."""
        numbers, n = self.origins[:, 0], len(self.conversations)
        if len(self) and (self.values.min() < 0 or numbers.min() < 0 or numbers.max() >= n):
            raise damaged(self._file.path, "a pair of no conversation or token", "one of those")
        if not ((self.weights > 0) & np.isfinite(self.weights)).all():
            raise damaged(self._file.path, "a weight that is not above 0", "one that is")


def _require_model(file: DatastoreFile, fingerprint: bytes | None) -> None:
    if fingerprint not in (None, file.fingerprint):
        raise StoreError(
            f"cannot use datastore {file.path}: found keys of the model with fingerprint "
            f"{file.fingerprint.hex()[:16]}, expected {fingerprint.hex()[:16]}. To another model "
            "they mean nothing: use the one they are of, or build a datastore for this one with "
            "`llmaas datastore build`."
        )


def _read_basis(file: DatastoreFile) -> Basis | None:
    return Basis(file.read("mean"), file.read("axes")) if file.counts.n_axes else None


class _Scan:
    """All codes, in memory."""

    def __init__(self, file: DatastoreFile) -> None:
        self._codes = _read_codes(file)
        self.n_bytes = self._codes.n_bytes

    def nearest(self, query: Floats, n: int, within: range) -> Ints:
        """The ``n`` nearest rows of these."""
        return knn_scan(self._codes, query, n, within.start, len(within)).rows


def _runs(numbers: Ints, owners: Sequence[str | None]) -> list[tuple[str | None, range]]:
    """Neighbouring rows of one owner, given each row's conversation."""
    if not owners:
        return [(None, range(len(numbers)))] if len(numbers) else []
    names = list(dict.fromkeys(owners))
    of_rows = np.array([names.index(owner) for owner in owners], np.int64)[numbers]
    edges = [0, *(np.flatnonzero(np.diff(of_rows)) + 1).tolist(), len(numbers)]
    parts = [range(a, b) for a, b in itertools.pairwise(edges) if a < b]
    return [(names[of_rows[rows.start]], rows) for rows in parts]


def _faiss_index(file: DatastoreFile, basis: Basis | None) -> FaissIndex:
    keys = (part.astype(np.float32) for part in read_keys(file))
    parts = (part if basis is None else basis.project(part) for part in keys)
    return FaissIndex(file.counts.n_rows, file.counts.n_dims, parts)


def _read_codes(file: DatastoreFile) -> KnnCodes:
    counts, centre, steps = file.counts, file.read("centre"), file.read("steps")
    codes = KnnCodes.empty(counts.n_rows, centre, steps, counts.n_front)
    for name in ("front", "rest", "scales", "norms", "front_norms"):
        file.read(name, into=getattr(codes, name))
    return codes

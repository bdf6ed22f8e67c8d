"""The selected datastore: one byte a number in memory for scanning, the keys in a file."""

from __future__ import annotations

import itertools
import math
import os
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from llmaas_hooks import StoreError
from llmaas_plugins._native import KNN_MAX_BEST, KnnCodes, NativeError, knn_rescore, knn_scan
from llmaas_plugins.knn_lm.datastore.faiss_index import FaissIndex
from llmaas_plugins.knn_lm.datastore.file import DatastoreFile, damaged
from llmaas_plugins.knn_lm.datastore.metadata import DatastoreMetadata
from llmaas_plugins.knn_lm.datastore.pca import Basis
from llmaas_plugins.knn_lm.datastore.writer import read_keys, write_datastore, write_without

__all__ = ["Datastore", "IndexKind", "Neighbors"]

_SPARE_ROWS = 16
"""Rows rescored beyond the measured number: with few neighbors, each missed one costs more."""

IndexKind = Literal["scan", "faiss"]
Ints = NDArray[np.int32]
Floats = NDArray[np.float32]
Keys = NDArray[np.float16] | NDArray[np.float32]

_NO_ROWS: Ints = np.empty(0, np.int32)
_NO_DISTANCES: Floats = np.empty(0, np.float32)


class Neighbors(NamedTuple):
    """The nearest pairs, nearest first.

    Attributes:
        values: Targets of the pairs.
        distances: Squared Euclidean distances of the pairs' keys to the query.
        weights: For each pair, how many pairs of the full datastore it stands for.
        rows: Rows of the pairs in the datastore.
    """

    values: Ints
    distances: Floats
    weights: Floats
    rows: Ints


_MOST_IN_QUERY = 1e15
"""Largest number in a query for which distances to finite keys are surely finite in float32."""


class Datastore:
    """An open selected datastore; several threads may search it."""

    def __init__(self, file: DatastoreFile, kind: IndexKind) -> None:
        """Load everything in a file except its keys, and take ownership of the file.

        Raises:
            StoreError: The file is damaged.
            ConfigError: The index is not available.
        """
        metadata = DatastoreMetadata.read(file)
        self.conversations = metadata.conversations
        self.settings = metadata.settings
        self.values: Ints = file.read("values")
        self.origins: Ints = file.read("origins")
        self.weights: Floats = file.read("weights")
        self._rows_per_neighbor = metadata.rows_per_neighbor
        self._sums = file.read("sums")
        self._basis = _read_basis(file)
        self._index = _Scan(file) if kind == "scan" else _faiss_index(file, self._basis)
        self._file = file
        self._check_ranges()
        self._runs = _runs(self.origins[:, 0], metadata.owners)
        weakref.finalize(self, file.close)  # threads may still search a datastore that was replaced

    @classmethod
    def open(cls, path: Path, fingerprint: bytes | None, index: IndexKind = "scan") -> Self:
        """Open a file for the model with this fingerprint, or for any model if it is ``None``.

        Args:
            path: Path of the file.
            fingerprint: Fingerprint of the model.
            index: Kind of search: exact over all codes, or approximate (see ``faiss_index``).

        Raises:
            StoreError: The file cannot be read, is damaged, or was made for another model.
            ConfigError: The index is not available.
        """
        file = DatastoreFile(path)
        try:
            _require_model(file, fingerprint)
            return cls(file, index)
        except BaseException:
            file.close()
            raise

    @staticmethod
    def write(  # noqa: PLR0913 -- the parts of a datastore
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
        between: Callable[[], None] = lambda: None,
    ) -> None:
        """Write a file, replacing an existing one.

        Args:
            path: Path of the file, which gets mode 0600.
            fingerprint: Fingerprint of the model that made the keys, 32 bytes.
            keys: Hidden states, shape (n, n_embd).
            values: Tokens that came next.
            weights: For each pair, how many pairs it stands for, above 0; 1 if left out.
            origins: For each pair, index of its conversation and position there; shape (n, 2).
            conversations: Ids of the conversations.
            basis: Directions to scan in; ``None`` scans all dimensions.
            settings: Any JSON-serializable values; they are read back unchanged.
            owners: For each conversation, the only app that may use it, or None if all apps may. A
                search is fastest if pairs of one owner are adjacent.
            between: Called between parts of the keys; an exception that it raises ends the work.

        Raises:
            ValueError: The arrays do not fit together, or a key is not finite in float16.
            StoreError: The file cannot be written. An existing file is unchanged.
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
            between=between,
        )

    @staticmethod
    def without(path: Path, conversations: Collection[str]) -> int:
        """Rewrite a file without these conversations, and overwrite the old file with zeros.

        Data computed from all pairs together (basis, center, steps, settings) stays. A process that
        has the old file open finds that it is not current, and that its keys are damaged.

        Returns:
            Number of pairs removed.

        Raises:
            StoreError: The file cannot be read or written, or is damaged. It is unchanged.
        """
        return write_without(path, conversations)

    def __len__(self) -> int:
        """Return the number of pairs."""
        return len(self.values)

    @property
    def n_embd(self) -> int:
        """Numbers in a key."""
        return self._file.counts.n_embd

    @property
    def fingerprint(self) -> bytes:
        """Fingerprint of the model that made the keys."""
        return self._file.fingerprint

    @property
    def digest(self) -> bytes:
        """Digest of the content, 32 bytes."""
        return self._file.digest

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory that the arrays take."""
        basis = () if self._basis is None else (self._basis.mean, self._basis.axes)
        arrays = (self.values, self.origins, self.weights, self._sums, *basis)
        return self._index.n_bytes + sum(array.nbytes for array in arrays)

    def is_current(self) -> bool:
        """Return whether the open file is still the one at its path."""
        try:
            return os.path.samestat(os.fstat(self._file.fd), self._file.path.stat())
        except OSError:
            return False

    def ranges_for(self, app: str | None, *, all_apps: bool = False) -> tuple[range, ...]:
        """Return the rows that an app may use: its own, and those that belong to no app.

        Args:
            app: Name of the app; None has no rows of its own.
            all_apps: Whether the app may also use rows that belong to other apps.
        """
        if all_apps:
            return (range(len(self)),) if len(self) else ()
        return tuple(rows for owner, rows in self._runs if owner is None or owner == app)

    def search(self, query: Floats, k: int, ranges: Sequence[range] | None = None) -> Neighbors:
        """Return the ``k`` pairs whose keys are nearest to ``query``; fewer if there are fewer.

        Args:
            query: Hidden state, shape (n_embd,).
            k: Number of pairs.
            ranges: Rows to search; all if left out. Other rows are not read.

        Raises:
            ValueError: ``k`` or the query's shape is wrong, or the query is not finite.
            StoreError: A key cannot be read, or is damaged.
        """
        if query.shape != (self.n_embd,) or not 1 <= k <= KNN_MAX_BEST:
            raise ValueError(
                f"search of {k} neighbors of {query.shape}: expected 1 to {KNN_MAX_BEST} of "
                f"{self.n_embd} numbers"
            )
        scanned = query if self._basis is None else self._basis.project(query)
        n_best = min(math.ceil(k * self._rows_per_neighbor) + _SPARE_ROWS, KNN_MAX_BEST)
        ranges = self.ranges_for(None, all_apps=True) if ranges is None else ranges
        found = [self._index.nearest(scanned, n_best, within) for within in ranges]
        rows = np.concatenate([_NO_ROWS, *found])
        exact = [self._exact_distances(part, query) for part in found]
        distances = np.concatenate([_NO_DISTANCES, *exact])
        order = np.lexsort((rows, distances))[:k]
        rows = rows[order]
        return Neighbors(self.values[rows], distances[order], self.weights[rows], rows)

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
        """Close the file; idempotent."""
        self._file.close()

    def _check_ranges(self) -> None:
        """Refuse values out of range: checksums do not detect files made by other programs."""
        numbers, n = self.origins[:, 0], len(self.conversations)
        if len(self) and (self.values.min() < 0 or numbers.min() < 0 or numbers.max() >= n):
            raise damaged(self._file.path, "a pair of no conversation or token", "one of each")
        if not ((self.weights > 0) & np.isfinite(self.weights)).all():
            raise damaged(self._file.path, "a weight that is not above 0", "finite weights above 0")


def _require_model(file: DatastoreFile, fingerprint: bytes | None) -> None:
    if fingerprint not in (None, file.fingerprint):
        raise StoreError(
            f"cannot use datastore {file.path}: found keys of the model with fingerprint "
            f"{file.fingerprint.hex()[:16]}, expected {fingerprint.hex()[:16]}. "
            "Load the model that made them, or build a datastore for this one with "
            "`llmaas datastore build`."
        )


def _read_basis(file: DatastoreFile) -> Basis | None:
    return Basis(file.read("mean"), file.read("axes")) if file.counts.n_axes else None


class _Scan:
    """Exact search over all codes, in memory."""

    def __init__(self, file: DatastoreFile) -> None:
        self._codes = _read_codes(file)
        self.n_bytes = self._codes.n_bytes

    def nearest(self, query: Floats, n: int, within: range) -> Ints:
        """Return the ``n`` nearest rows in ``within``."""
        return knn_scan(self._codes, query, n, within.start, len(within)).rows


def _runs(numbers: Ints, owners: Sequence[str | None]) -> list[tuple[str | None, range]]:
    """Return the runs of adjacent rows with one owner, given each row's conversation."""
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
    counts, center, steps = file.counts, file.read("center"), file.read("steps")
    codes = KnnCodes.empty(counts.n_rows, center, steps, counts.n_front)
    for name in ("front", "rest", "scales", "norms", "front_norms"):
        file.read(name, into=getattr(codes, name))
    return codes

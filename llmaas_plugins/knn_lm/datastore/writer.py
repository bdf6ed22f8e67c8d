"""Writing of selected datastores, from pairs or from an old file without some conversations."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmaas_plugins._native import KnnCodes, knn_quantize, knn_stride, knn_sum
from llmaas_plugins.knn_lm.datastore.file import DatastoreFile, damaged, write_file
from llmaas_plugins.knn_lm.datastore.layout import ArrayCounts
from llmaas_plugins.knn_lm.datastore.metadata import DatastoreMetadata
from llmaas_plugins.knn_lm.datastore.pca import Basis
from llmaas_plugins.knn_lm.datastore.recall import rows_per_neighbor

__all__ = ["read_keys", "write_datastore", "write_without"]

_ROWS = 8192
"""Keys processed at a time."""

_FINGERPRINT_BYTES = 32

_OF_ROWS = (
    "values",
    "origins",
    "weights",
    "scales",
    "norms",
    "sums",
    "front_norms",
    "front",
    "rest",
)

_FRONT_SHARE = 0.9
"""Share of the keys' variance that the front dimensions must hold.

On hidden states, that many dimensions rule out at least 97 of 100 rows.
"""

_FRONT_MOST = 0.75
"""Largest share of the dimensions for a front: scanning more in two passes saves no time."""

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]
Halves = NDArray[np.float16]
Keys = Halves | NDArray[np.float32]


def write_datastore(  # noqa: PLR0913 -- the parts of a datastore
    path: Path,
    *,
    fingerprint: bytes,
    keys: Keys,
    values: Ints,
    weights: Floats,
    origins: Ints,
    conversations: Sequence[str],
    basis: Basis | None,
    settings: Mapping[str, Any],
    owners: Sequence[str | None],
    between: Callable[[], None],
) -> None:
    """Write a datastore; see :meth:`.Datastore.write`."""
    _check(fingerprint, keys, values, weights, origins, conversations)
    _require("owners", len(owners), len(conversations))
    with np.errstate(over="ignore"):  # overflowed numbers are refused with the infinite ones
        halves = np.ascontiguousarray(keys, np.float16)
    codes = _quantized(halves, basis, between)
    n_wanted = rows_per_neighbor(codes, basis, halves)
    text = DatastoreMetadata(tuple(conversations), settings, n_wanted, tuple(owners)).encoded()
    n_embd = keys.shape[1]
    counts = ArrayCounts(
        n_embd=n_embd,
        n_dims=len(codes.center),
        n_front=codes.front.shape[1],
        n_axes=len(codes.center) if basis else 0,
        n_rows=len(keys),
        n_text=len(text),
    )
    arrays: dict[str, NDArray[Any]] = {
        "text": np.frombuffer(text, np.uint8),
        "values": values,
        "origins": origins,
        "weights": weights,
        "mean": basis.mean if basis else np.empty(0, np.float32),
        "axes": basis.axes if basis else np.empty((0, 0), np.float32),
        "center": codes.center,
        "steps": codes.steps,
        "scales": codes.scales,
        "norms": codes.norms,
        "sums": knn_sum(halves),
        "front_norms": codes.front_norms,
        "front": codes.front,
        "rest": codes.rest,
    }
    write_file(path, fingerprint, counts, arrays, _parts(halves))


def write_without(path: Path, conversations: Collection[str]) -> int:
    """Rewrite a datastore without some conversations; see :meth:`.Datastore.without`."""
    file = DatastoreFile(path)
    try:
        metadata = DatastoreMetadata.read(file)
        kept = [i for i, name in enumerate(metadata.conversations) if name not in conversations]
        if len(kept) == len(metadata.conversations):
            return 0
        origins = file.read("origins")
        is_kept = np.isin(origins[:, 0], kept)
        arrays = {name: file.read(name) for name in file.counts.arrays()}
        for name in _OF_ROWS:
            if len(arrays[name]):  # front_norms is empty if codes have only one part
                arrays[name] = arrays[name][is_kept]
        arrays["origins"][:, 0] = np.searchsorted(kept, arrays["origins"][:, 0])
        new_text = metadata.without(kept).encoded()
        arrays["text"] = np.frombuffer(new_text, np.uint8)
        counts = file.counts._replace(n_rows=int(is_kept.sum()), n_text=len(new_text))
        kept_keys = _kept(read_keys(file), is_kept)
        write_file(path, file.fingerprint, counts, arrays, kept_keys, erases_old=True)
        return len(is_kept) - counts.n_rows
    finally:
        file.close()


def read_keys(file: DatastoreFile) -> Iterator[Halves]:
    """Yield all keys in parts, each key verified.

    Raises:
        StoreError: A key is damaged.
    """
    sums = file.read("sums")
    for first in range(0, len(sums), _ROWS):
        part = slice(first, min(first + _ROWS, len(sums)))
        keys = file.read_keys(part.start, part.stop - part.start)
        if not np.array_equal(knn_sum(keys), sums[part]):
            raise damaged(file.path, "a damaged key", "the one that was written")
        yield keys


def _kept(parts: Iterator[Halves], is_kept: NDArray[np.bool_]) -> Iterator[Halves]:
    first = 0
    for part in parts:
        yield part[is_kept[first : first + len(part)]]
        first += len(part)


def _quantized(keys: Halves, basis: Basis | None, between: Callable[[], None]) -> KnnCodes:
    """Quantize all keys, using each dimension's mean as center and its standard deviation as step.

    Raises:
        ValueError: A key is not finite.
    """
    n, n_dims = len(keys), len(basis.axes) if basis else keys.shape[1]
    total, squares = np.zeros(n_dims), np.zeros(n_dims)
    with np.errstate(all="ignore"):
        for part in _coordinates(keys, basis):
            between()
            total += part.sum(axis=0, dtype=np.float64)
            squares += np.einsum("ij,ij->j", part, part, dtype=np.float64)
    if not np.isfinite(squares).all():
        raise ValueError("keys: found some that are not finite in float16, expected none")
    center = total / max(n, 1)
    steps = np.sqrt(np.maximum(squares / max(n, 1) - center**2, 0))
    n_front = None if basis is None else _front(steps)
    codes = KnnCodes.empty(n, center.astype(np.float32), steps.astype(np.float32), n_front)
    for index, part in enumerate(_coordinates(keys, basis)):
        between()
        knn_quantize(codes, part, index * _ROWS)
    return codes


def _front(steps: NDArray[np.float64]) -> int | None:
    """Return how many leading dimensions to scan first, or None if they would be nearly all."""
    share = np.cumsum(steps**2) / max(float(np.sum(steps**2)), 1e-300)
    n_front = knn_stride(int(np.searchsorted(share, _FRONT_SHARE)) + 1)
    return n_front if n_front <= _FRONT_MOST * len(steps) else None


def _parts(keys: Halves) -> Iterator[Halves]:
    return (keys[first : first + _ROWS] for first in range(0, len(keys), _ROWS))


def _coordinates(keys: Halves, basis: Basis | None) -> Iterator[NDArray[np.float32]]:
    for part in _parts(keys):
        wide = part.astype(np.float32)
        yield wide if basis is None else np.ascontiguousarray(basis.project(wide))


def _check(  # noqa: PLR0913, PLR0917
    fingerprint: bytes,
    keys: Keys,
    values: Ints,
    weights: Floats,
    origins: Ints,
    conversations: Sequence[str],
) -> None:
    n = len(keys)
    _require("fingerprint", len(fingerprint), _FINGERPRINT_BYTES)
    _require("shape of values", values.shape, (n,))
    _require("shape of weights", weights.shape, (n,))
    _require("shape of origins", origins.shape, (n, 2))
    _require("conversations that are named twice", len(conversations) - len(set(conversations)), 0)
    if n:
        _require("tokens below 0", int((values < 0).sum()), 0)
        _require("weights not above 0", int((~(weights > 0) | np.isinf(weights)).sum()), 0)
        is_known = (origins[:, 0] >= 0) & (origins[:, 0] < len(conversations))
        _require("pairs of no conversation", int((~is_known).sum()), 0)


def _require(what: str, found: object, expected: object) -> None:
    if found != expected:
        raise ValueError(f"{what}: found {found}, expected {expected}")

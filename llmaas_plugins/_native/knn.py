"""Search nearest neighbors among stored hidden states, and mix them into the next logits."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmaas_hooks.errors import StoreError

from ._ffi import ffi, lib
from .base import Status, as_input, fail

__all__ = [
    "KNN_ALIGN",
    "KNN_MAX_BEST",
    "KNN_MAX_DIMS",
    "KnnCodes",
    "LogitsInfo",
    "Nearest",
    "knn_quantize",
    "knn_rescore",
    "knn_scan",
    "knn_stride",
    "knn_sum",
    "logits_mix",
    "logits_peek",
]

KNN_ALIGN: int = lib.LLMAAS_KNN_ALIGN
"""Alignment of rows of codes, in bytes."""

KNN_MAX_BEST: int = lib.LLMAAS_KNN_MAX_BEST
"""Most rows that one call returns, rescores or mixes."""

KNN_MAX_DIMS: int = lib.LLMAAS_KNN_MAX_DIMS

_FINITE = "keys and queries must be finite, and small enough to be squared"
_SOUND = "logits must hold a number, and neither NaN nor +infinity"

Floats = NDArray[np.float32]
Halves = NDArray[np.float16]
Ints = NDArray[np.int32]
Sums = NDArray[np.uint32]


class Nearest(NamedTuple):
    """Rows, nearest first, and their approximate squared distances."""

    rows: Ints
    distances: Floats


class LogitsInfo(NamedTuple):
    """Logarithm of softmax's denominator, and probability of the most likely token."""

    log_sum_exp: float
    max_prob: float


@dataclass(frozen=True, slots=True)
class KnnCodes:
    """Keys quantized to one byte per dimension, ready for :func:`knn_scan`.

    The codes can be stored in two parts. The second part is read only for rows that are near enough
    by the first. That is faster if the first dimensions are those in which keys differ most.

    Attributes:
        front: First part, ``uint8[n, n_front]``; ``n_front`` is a multiple of 64, and rows are
            aligned to 64 bytes.
        rest: Second part, ``uint8[n, n_rest]``, aligned as ``front``; both parts together are
            :func:`knn_stride` wide.
        scales: Scale of each row, ``float32[n]``.
        norms: Term that each row adds to its squared distances, whatever the query; ``float32[n]``.
        front_norms: Least value of that term in the first part, ``float32[n]``; empty without a
            second part.
        center: Center of the keys, ``float32[d]``.
        steps: Step of each dimension, ``float32[d]``; a key is about ``center + steps * scale *
            (code - 128)``.
    """

    front: NDArray[np.uint8]
    rest: NDArray[np.uint8]
    scales: Floats
    norms: Floats
    front_norms: Floats
    center: Floats
    steps: Floats
    handle: Any = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Check that the parts fit together, and pass them to the core."""
        (n, n_front), (n_dims,) = self.front.shape, self.center.shape
        n_rest = knn_stride(n_dims) - n_front
        found = [array.shape for array in self._arrays()]
        expected = [(n, n_front), (n, n_rest), (n,), (n,), (n if n_rest else 0,), (n_dims,)]
        if found != [*expected, (n_dims,)]:
            raise fail(f"codes of shapes {found}, for {n_dims} dimensions", lib.LLMAAS_EINVAL)
        parts = {
            "n_rows": n,
            "n_dims": n_dims,
            "n_front": n_front,
            "center": _floats(self.center),
            "steps": _floats(self.steps),
            "front": as_input(self.front),
            "rest": as_input(self.rest),
            "scales": _floats(self.scales),
            "norms": _floats(self.norms),
            "front_norms": _floats(self.front_norms),
        }
        # The struct only points to the arrays; they stay alive because self holds them.
        handle = ffi.new("llmaas_knn_codes *", parts)
        object.__setattr__(self, "handle", handle)

    def _arrays(self) -> tuple[NDArray[Any], ...]:
        return (
            self.front, self.rest, self.scales, self.norms, self.front_norms, self.center,
            self.steps,
        )  # fmt: skip

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.front)

    @property
    def n_bytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in self._arrays())

    @classmethod
    def empty(cls, n: int, center: Floats, steps: Floats, n_front: int | None = None) -> KnnCodes:
        """Allocate codes for ``n`` rows, in one part unless ``n_front`` is given."""
        stride = knn_stride(len(center))
        n_front = stride if n_front is None else n_front
        front, rest = _aligned(n, n_front), _aligned(n, stride - n_front)
        scales, norms = np.empty(n, np.float32), np.empty(n, np.float32)
        front_norms = np.empty(n if n_front < stride else 0, np.float32)
        return cls(front, rest, scales, norms, front_norms, center, steps)


def _aligned(n: int, n_bytes: int) -> NDArray[np.uint8]:
    room = np.empty(n * n_bytes + KNN_ALIGN, np.uint8)
    start = -room.ctypes.data % KNN_ALIGN
    return room[start : start + n * n_bytes].reshape(n, n_bytes)


def knn_stride(n_dims: int) -> int:
    """Return the bytes of a row of codes."""
    return -(-n_dims // KNN_ALIGN) * KNN_ALIGN


def knn_quantize(codes: KnnCodes, keys: Floats, first: int = 0) -> None:
    """Quantize keys, ``float32[n, d]``, into the rows from ``first`` on.

    Raises:
        NativeError: EUNSUPPORTED if a key is not finite, cannot be squared or is 2^50 steps from
            the center. EINVAL if a step is neither 0 nor within 2^-50 and 2^50, or the rows do not
            exist.
    """
    if keys.ndim != 2 or keys.shape[1] != len(codes.center):
        raise fail(f"keys {keys.shape} for {len(codes.center)} dimensions", lib.LLMAAS_EINVAL)
    status = lib.llmaas_knn_quantize(codes.handle, first, len(keys), _floats(keys))
    if status:
        raise fail(f"quantizing {len(keys)} keys from row {first} on ({_FINITE})", status)


def knn_scan(
    codes: KnnCodes, query: Floats, n_best: int, first: int = 0, n: int | None = None
) -> Nearest:
    """Find the ``n_best`` rows nearest to ``query`` among ``n`` rows from ``first`` on.

    Several threads can scan a range each: the best of their results equal the result of one scan.

    Raises:
        NativeError: EUNSUPPORTED if the query is not finite or cannot be squared.
    """
    n = len(codes) - first if n is None else n
    if query.shape != codes.center.shape:
        raise fail(f"query {query.shape}, expected {codes.center.shape}", lib.LLMAAS_EINVAL)
    room = max(min(n_best, n, KNN_MAX_BEST), 0)
    rows, distances = np.empty(room, np.int32), np.empty(room, np.float32)
    scratch = np.empty(max(n, 0) if len(codes.front_norms) else 0, np.uint32)
    n_found = ffi.new("uint32_t *")
    status = lib.llmaas_knn_scan(
        codes.handle, first, n, _floats(query), n_best, _sums(scratch), _ints(rows),
        _floats(distances), n_found,
    )  # fmt: skip
    if status:
        raise fail(
            f"search of {n_best} (1..{KNN_MAX_BEST}) in rows {first}..{first + n - 1} of"
            f" {len(codes)} ({_FINITE})",
            status,
        )
    return Nearest(rows[: n_found[0]], distances[: n_found[0]])


def knn_sum(keys: Halves) -> Sums:
    """Return the CRC-32C of each row of ``float16[n, d]``, for :func:`knn_rescore`."""
    n, n_dims = keys.shape
    sums = np.empty(n, np.uint32)
    status = lib.llmaas_knn_sum(_view("uint8_t[]", keys, np.float16), n, n_dims, _sums(sums))
    if status:
        raise fail(f"sums of keys {keys.shape}", status)
    return sums


def knn_rescore(fd: int, offset: int, sums: Sums, rows: Ints, query: Floats) -> Floats:
    """Return the exact squared distances of float16 rows in a file.

    Args:
        fd: Descriptor of the file.
        offset: Offset of row 0; rows follow each other without gaps.
        sums: Checksums of all rows, by :func:`knn_sum`.
        rows: At most ``KNN_MAX_BEST`` rows, in any order.
        query: Query, with as many values as a row.

    Raises:
        StoreError: A row cannot be read.
        NativeError: ECORRUPT if a row differs from its checksum; EINVAL if a row does not exist.
    """
    distances = np.empty(len(rows), np.float32)
    file = {
        "fd": fd,
        "n_dims": len(query),
        "n_rows": len(sums),
        "offset": offset,
        "sums": _sums(sums),
    }
    status = lib.llmaas_knn_rescore(
        ffi.new("llmaas_knn_rows *", file), _ints(rows), len(rows), _floats(query),
        _floats(distances),
    )  # fmt: skip
    if status == Status.EIO:
        code = ffi.errno
        raise StoreError(code, f"stored keys: a row cannot be read: {os.strerror(code)}")
    if status:
        raise fail(f"rescoring of {len(rows)} of {len(sums)} rows of {len(query)} values", status)
    return distances


def logits_peek(logits: Floats) -> LogitsInfo:
    """Return how certain the model is.

    Raises:
        NativeError: EUNSUPPORTED if a logit is NaN or +infinity, or all are -infinity.
    """
    info = ffi.new("llmaas_logits_info *")
    status = lib.llmaas_logits_peek(_floats(logits), len(logits), info)
    if status:
        raise fail(f"softmax of {len(logits)} logits ({_SOUND})", status)
    return LogitsInfo(info.log_sum_exp, info.max_prob)


def logits_mix(  # noqa: PLR0913, PLR0917 -- the C call's arguments
    logits: Floats,
    values: Ints,
    distances: Floats,
    alpha: float,
    beta: float,
    theta: float,
    far: float = math.inf,
) -> LogitsInfo:
    """Change logits in place so that softmax gives ``(1 - w) p_LM + w p_kNN``.

    The weight of a neighbor is ``exp(-distance / theta)``, and ``s`` is the sum of these weights. A
    token's ``p_kNN`` is its neighbors' share of ``s``. ``w`` is ``alpha * (1 - beta * max_prob)``,
    times ``s / (s + exp(-far / theta))``. Logits of -infinity (banned tokens) stay.

    Args:
        logits: Logits of the whole vocabulary.
        values: Tokens of the neighbors, at most ``KNN_MAX_BEST``.
        distances: Distances of the neighbors.
        alpha: Largest weight of the neighbors, 0 to 1.
        beta: How much a certain model reduces that weight, 0 to 1.
        theta: Scale of distances, above 0.
        far: Distance of one extra neighbor that stands for the model's own prediction.

    Returns:
        The result of :func:`logits_peek` for the unchanged logits.

    Raises:
        NativeError: As :func:`logits_peek`; EINVAL if a token is not in the vocabulary, or a
            distance or setting is out of range.
    """
    if len(values) != len(distances):
        raise fail(f"{len(values)} values with {len(distances)} distances", lib.LLMAAS_EINVAL)
    if not logits.flags.writeable:
        raise fail("logits are read-only", lib.LLMAAS_EINVAL)
    info = ffi.new("llmaas_logits_info *")
    status = lib.llmaas_logits_mix(
        _floats(logits), len(logits), _ints(values), _floats(distances), len(values),
        alpha, beta, theta, far, info,
    )  # fmt: skip
    if status:
        raise fail(
            f"mixing of {len(values)} neighbors into {len(logits)} logits with alpha {alpha},"
            f" beta {beta}, theta {theta}, far {far} ({_SOUND})",
            status,
        )
    return LogitsInfo(info.log_sum_exp, info.max_prob)


def _floats(array: Floats) -> Any:
    return _view("float[]", array, np.float32)


def _ints(array: Ints) -> Any:
    return _view("int32_t[]", array, np.int32)


def _sums(array: Sums) -> Any:
    return _view("uint32_t[]", array, np.uint32)


def _view(cdecl: str, array: NDArray[Any], dtype: type) -> Any:
    if array.dtype != dtype:
        raise fail(f"an array of {array.dtype}, expected {np.dtype(dtype)}", lib.LLMAAS_EINVAL)
    return ffi.from_buffer(cdecl, array)  # type: ignore[arg-type]

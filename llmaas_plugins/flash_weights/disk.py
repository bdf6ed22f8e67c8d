"""Measure the cost of reads from a disk, and reduce it to seconds per read and bytes per second."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmaas_hooks import StoreError
from llmaas_plugins._native import read_rate
from llmaas_plugins.files.json_text import parse_json

__all__ = ["DEPTHS", "MOST_BYTES", "SIZES", "Disk", "Rate", "fit_disk", "measure_disk"]

SIZES = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20)
"""Sizes of reads, in bytes."""
DEPTHS = (1, 4, 16, 64, 256)
"""Numbers of concurrent reads."""
MOST_BYTES = 64 << 20
"""Most bytes of all concurrent reads, which is the memory that measuring takes."""
_ROUNDS = 5
_LEAST_S = 1e-3
_MOST_COUNT = 1 << 40
_MOST_SPEED = 1e15
_ALIKE = 0.95
"""Ratio above which two rates count as equal; then fewer concurrent reads are better."""


class Rate(NamedTuple):
    """Bytes per second of reads of one size at one number of concurrent reads."""

    n_bytes: int
    depth: int
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Disk:
    """Disk on which a read takes ``read_s``, plus the time of its bytes.

    Attributes:
        read_s: Seconds per read beside those for its bytes, with other reads under way.
        bytes_per_s: Rate of long reads.
        small_depth: Number of concurrent reads at which the smallest reads are fastest.
        large_depth: Number of concurrent reads at which the largest reads are fastest.
        rates: Measured rates, as medians.
    """

    read_s: float
    bytes_per_s: float
    small_depth: int
    large_depth: int
    rates: tuple[Rate, ...]

    @property
    def fast_sizes(self) -> list[int]:
        """Sizes of reads whose rate is close to the best, ascending."""
        best = [_best(self.rates, size) for size in sorted({rate.n_bytes for rate in self.rates})]
        least = _ALIKE * max(rate.bytes_per_s for rate in best)
        return [rate.n_bytes for rate in best if rate.bytes_per_s >= least]

    @property
    def gap_bytes(self) -> int:
        """Longest gap that is cheaper to read than to skip with a second read."""
        return int(self.read_s * self.bytes_per_s)

    def seconds(self, n_bytes_each: float, n_reads: float) -> float:
        """Return the seconds that ``n_reads`` reads take."""
        return n_reads * (self.read_s + n_bytes_each / self.bytes_per_s)

    def to_json(self) -> str:
        """Return the measurement as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Disk:
        """Parse the JSON of ``to_json``.

        Raises:
            ValueError: The text is no measurement of a disk.
        """
        try:
            fields = parse_json(text)
            rates = tuple(Rate(*rate) for rate in fields.pop("rates"))
            found = cls(**fields, rates=rates)
            found._check()
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            raise ValueError(f"this is no measurement of a disk: {error}") from error
        return found

    def _check(self) -> None:
        """Refuse numbers that no measurement gives.

        Raises:
            ValueError: A number is out of range.
        """
        counts = [self.small_depth, self.large_depth]
        speeds = [self.read_s, self.bytes_per_s]
        for rate in self.rates:
            counts += rate[:2]
            speeds.append(rate.bytes_per_s)
        if not self.rates or not all(type(n) is int and 0 < n <= _MOST_COUNT for n in counts):
            raise ValueError(f"found {counts}, expected sizes and depths from 1 to {_MOST_COUNT}")
        are_numbers = all(type(n) in {int, float} for n in speeds)
        if not are_numbers or not all(0 <= n <= _MOST_SPEED for n in speeds) or not all(speeds[1:]):
            raise ValueError(f"found {speeds}, expected times and speeds up to {_MOST_SPEED:g}")


def measure_disk(
    path: Path, seconds: float = 10.0, progress: Callable[[float], object] = lambda _s: None
) -> Disk:
    """Measure the disk under a file, bypassing the page cache.

    Sizes and depths alternate, so that a drift of the disk's rate affects all of them.

    Args:
        path: File to read; it is not changed.
        seconds: Total time to measure.
        progress: Called with the seconds since the last call.

    Raises:
        StoreError: The file cannot be read, or is too short.
    """
    sizes = _sizes_of(path)
    began = last = time.monotonic()
    pairs = [
        (n_bytes, depth) for n_bytes in sizes for depth in DEPTHS if n_bytes * depth <= MOST_BYTES
    ]
    taken = []
    for n in range(_ROUNDS * len(pairs)):
        left = seconds - (last - began)
        if n >= len(pairs) and left <= 0:
            break
        n_bytes, depth = pairs[n % len(pairs)]
        share = max(left / (_ROUNDS * len(pairs) - n), _LEAST_S)
        taken.append(Rate(n_bytes, depth, read_rate(path, n_bytes, depth, share)))
        now = time.monotonic()
        progress(now - last)
        last = now
    return fit_disk(taken)


def fit_disk(taken: Iterable[Rate]) -> Disk:
    """Fit the seconds per read and the bytes per second to measured rates.

    The fit uses the median of each size and depth, and the best depth of each size, because the
    engine chooses its depth. Errors are relative, so that all sizes have the same weight.

    Raises:
        ValueError: All reads have the same size.
    """
    rates = _medians(taken)
    best = [_best(rates, n_bytes) for n_bytes in sorted({rate.n_bytes for rate in rates})]
    if len(best) < 2:
        raise ValueError("reads of one size cannot tell the cost of a read from that of its bytes")
    sizes = np.array([rate.n_bytes for rate in best], np.float64)
    took = sizes / np.array([rate.bytes_per_s for rate in best])
    read_s, byte_s = _line(sizes, took)
    return Disk(read_s, 1 / byte_s, best[0].depth, best[-1].depth, tuple(rates))


def _sizes_of(path: Path) -> list[int]:
    try:
        n_file = path.stat().st_size
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror}.") from error
    sizes = [size for size in SIZES if size <= n_file]
    if len(sizes) < 2:
        raise StoreError(
            f"{path} has {n_file} bytes, expected {SIZES[1]} or more to measure how fast the disk "
            "is."
        )
    return sizes


def _medians(taken: Iterable[Rate]) -> list[Rate]:
    found: dict[tuple[int, int], list[float]] = {}
    for n_bytes, depth, rate in taken:
        found.setdefault((n_bytes, depth), []).append(rate)
    return [Rate(*pair, float(np.median(rates))) for pair, rates in sorted(found.items())]


def _best(rates: Sequence[Rate], n_bytes: int) -> Rate:
    """Return the rate at the smallest depth that is about as fast as the fastest."""
    same = [rate for rate in rates if rate.n_bytes == n_bytes]
    least = _ALIKE * max(rate.bytes_per_s for rate in same)
    return next(rate for rate in same if rate.bytes_per_s >= least)


def _line(sizes: NDArray[np.float64], took: NDArray[np.float64]) -> tuple[float, float]:
    """Fit seconds per read and per byte by least squares of relative errors, none negative."""
    ones, per_s = np.ones_like(took), 1 / took
    (read_s, byte_s), *_ = np.linalg.lstsq(np.stack([per_s, sizes * per_s], axis=1), ones)
    # All sizes took equally long: take the time per byte from the best rate.
    if byte_s <= 0:
        byte_s = float((took / sizes).min())
        read_s = per_s @ (1 - byte_s * sizes * per_s) / (per_s @ per_s)
    # Long reads were slower, so the cost per read cannot be seen.
    if read_s < 0:
        rates = sizes * per_s
        read_s, byte_s = 0.0, rates.sum() / (rates @ rates)
    return float(read_s), float(byte_s)

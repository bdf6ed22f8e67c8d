"""What reading from the disk under a file costs: measured in seconds, told in two numbers."""

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
from llmaas_plugins.json_text import parse_json

__all__ = ["DEPTHS", "MOST_BYTES", "SIZES", "Disk", "Rate", "fit_disk", "measure_disk"]

SIZES = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20)
"""Bytes of a read."""
DEPTHS = (1, 4, 16, 64, 256)
"""Reads at a time."""
MOST_BYTES = 64 << 20
"""Of all reads under way: memory that measuring takes."""
_ROUNDS = 5
_LEAST_S = 1e-3
_MOST_COUNT = 1 << 40
_MOST_SPEED = 1e15
_ALIKE = 0.95
"""Rates that differ by less are the same here: fewer reads at a time are better then."""


class Rate(NamedTuple):
    """How fast reads of a size are, so many at a time."""

    n_bytes: int
    depth: int
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Disk:
    """A disk that takes ``read_s`` for each read, and its time for each byte.

    Attributes:
        read_s: Seconds that a read takes beside those for its bytes, with others under way.
        bytes_per_s: What long reads come to.
        small_depth: Reads at a time at which the smallest are fastest.
        large_depth: Likewise of the largest.
        rates: What was measured: medians.
    """

    read_s: float
    bytes_per_s: float
    small_depth: int
    large_depth: int
    rates: tuple[Rate, ...]

    @property
    def fast_sizes(self) -> list[int]:
        """Sizes of reads that are about as fast as any, rising."""
        best = [_best(self.rates, size) for size in sorted({rate.n_bytes for rate in self.rates})]
        least = _ALIKE * max(rate.bytes_per_s for rate in best)
        return [rate.n_bytes for rate in best if rate.bytes_per_s >= least]

    @property
    def gap_bytes(self) -> int:
        """Up to which it is cheaper to read on than to read twice."""
        return int(self.read_s * self.bytes_per_s)

    def seconds(self, n_bytes_each: float, n_reads: float) -> float:
        """What so many reads take."""
        return n_reads * (self.read_s + n_bytes_each / self.bytes_per_s)

    def to_json(self) -> str:
        """Itself as text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Disk:
        """What ``to_json`` made a text of.

        Raises:
            ValueError: It is something else.
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
            ValueError: There is one.
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
    """Measure the disk under a file, past the page cache.

    Sizes and depths take turns, so that a disk whose rate drifts is the same for all of them.

    Args:
        path: The file; reading it changes nothing.
        seconds: How long, in all.
        progress: Told of seconds that have gone by.

    Raises:
        StoreError: It cannot be read, or is too short to tell anything from.
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
    """The two numbers that come closest to what was measured.

    Of each size and depth the median counts, of each size the best depth: the engine has as many
    reads under way as help. Sizes have the same say, so differences are relative to what they take.

    Raises:
        ValueError: Reads were of one size only.
    """
    rates = _medians(taken)
    best = [_best(rates, n_bytes) for n_bytes in sorted({rate.n_bytes for rate in rates})]
    if len(best) < 2:
        raise ValueError("reads of one size do not tell what a read costs and what a byte does")
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
            f"{path} has {n_file} bytes, expected {SIZES[1]} or more: reads of it would not show "
            "how fast the disk is."
        )
    return sizes


def _medians(taken: Iterable[Rate]) -> list[Rate]:
    found: dict[tuple[int, int], list[float]] = {}
    for n_bytes, depth, rate in taken:
        found.setdefault((n_bytes, depth), []).append(rate)
    return [Rate(*pair, float(np.median(rates))) for pair, rates in sorted(found.items())]


def _best(rates: Sequence[Rate], n_bytes: int) -> Rate:
    """The fastest depth of a size; the smallest of those that are as fast."""
    same = [rate for rate in rates if rate.n_bytes == n_bytes]
    least = _ALIKE * max(rate.bytes_per_s for rate in same)
    return next(rate for rate in same if rate.bytes_per_s >= least)


def _line(sizes: NDArray[np.float64], took: NDArray[np.float64]) -> tuple[float, float]:
    """Seconds for a read and for a byte: least squares of relative differences, none below 0."""
    ones, per_s = np.ones_like(took), 1 / took
    (read_s, byte_s), *_ = np.linalg.lstsq(np.stack([per_s, sizes * per_s], axis=1), ones)
    if byte_s <= 0:  # all sizes take as long: a byte takes what it did at the best rate seen
        byte_s = float((took / sizes).min())
        read_s = per_s @ (1 - byte_s * sizes * per_s) / (per_s @ per_s)
    if read_s < 0:  # long reads were slower: that a read costs something cannot be seen
        rates = sizes * per_s
        read_s, byte_s = 0.0, rates.sum() / (rates @ rates)
    return float(read_s), float(byte_s)

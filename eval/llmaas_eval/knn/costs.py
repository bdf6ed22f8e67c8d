"""Time and peak memory of a design that selects pairs (Fig 8): ``python -m llmaas_eval.knn.costs``.

    python -m llmaas_eval.knn.costs ARCHIVE DESIGN N

The design gets the first N pairs of an archive and keeps 0.3 of them, in a process of its own.
``offline`` and ``online`` read keys from the archive when they need them, projected on 128
directions, as the plugin does. ``merging`` compares all keys with all, so it has all in memory. The
time of ``online`` is that of its slowest buffer, as in the paper. JSON is printed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llmaas_eval.knn.baselines import merge
from llmaas_eval.knn.options import SHARE
from llmaas_plugins.knn_lm.archive.archive import Archive
from llmaas_plugins.knn_lm.build.archive_source import (
    ArchiveSource,
    SelectionParams,
    archive_source,
    initial_objective,
)
from llmaas_plugins.knn_lm.selection.algorithms import Online, offline
from llmaas_plugins.machine import peak_bytes

__all__ = ["DESIGNS", "FirstPairs", "main"]

Indices = NDArray[np.int64]


class FirstPairs:
    """First pairs of a source, as a source of selection."""

    def __init__(self, source: ArchiveSource, n: int) -> None:
        """Keep the first ``n`` targets; keys are read on request."""
        self.values, self.p_lm, self.n_dims = source.values[:n], source.p_lm[:n], source.n_dims
        self.keys = source.keys


def main(argv: Sequence[str] | None = None) -> int:
    """Run one design and print its figures; return 0."""
    parser = argparse.ArgumentParser(prog="python -m llmaas_eval.knn.costs")
    parser.add_argument("archive", type=Path)
    parser.add_argument("design", choices=DESIGNS)
    parser.add_argument("n", type=int, help="pairs to select from")
    args = parser.parse_args(argv)
    with Archive.open(args.archive) as archive:
        before = peak_bytes()
        seconds, n_kept = DESIGNS[args.design](archive, args.n)
    found = {"seconds": seconds, "kept": n_kept, "more_bytes": peak_bytes() - before}
    sys.stdout.write(f"{json.dumps(found)}\n")
    return 0


# -- designs -------------------------------------------------------------------------------------


def _offline(archive: Archive, n: int) -> tuple[float, int]:
    source = archive_source(archive, SelectionParams())
    objective, first = initial_objective(source, 0), FirstPairs(source, n)
    started = time.perf_counter()
    kept = offline(first, round(SHARE * n), objective)
    return time.perf_counter() - started, len(kept)


def _online(archive: Archive, n: int) -> tuple[float, int]:
    source = archive_source(archive, SelectionParams())
    online = Online(FirstPairs(source, n), round(SHARE * n), initial_objective(source, 0))
    slowest, started = 0.0, time.perf_counter()
    for _ in online.advance(n, is_end=True):
        now = time.perf_counter()
        slowest, started = max(slowest, now - started), now
    return slowest, len(online.best())


def _merging(archive: Archive, n: int) -> tuple[float, int]:
    pairs = archive.pairs(np.arange(n))
    started = time.perf_counter()
    kept = merge(pairs.keys.astype(np.float32), pairs.values, round(SHARE * n))
    return time.perf_counter() - started, len(kept)


DESIGNS: Mapping[str, Callable[[Archive, int], tuple[float, int]]] = {
    "offline": _offline,
    "online": _online,
    "merging": _merging,
}
"""Functions that return the seconds of a design, and how many pairs it keeps."""


if __name__ == "__main__":
    sys.exit(main())

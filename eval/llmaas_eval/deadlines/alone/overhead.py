"""Memory and time of serving several sizes of a model: by levels, by files, or by copies.

A level as a file of its own stands for a small model that was trained in its place. It is loaded
from the page cache or from the disk, and evaluates its prompt anew, which is not counted.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from llmaas_eval.batches import batches, loaded
from llmaas_eval.elastic.cutting import even_widths, write_cut
from llmaas_eval.elastic.gathering import Gather
from llmaas_eval.elastic.memory import peak_with
from llmaas_eval.elastic.switches import Switches
from llmaas_eval.elastic.timing import on, seconds_of
from llmaas_plugins.demo.page_cache import drop_pages
from llmaas_plugins.elastic.uniform import LEVELS
from llmaas_plugins.elastic.units import blocks_of

__all__ = [
    "ALL_KEPT",
    "COPIED",
    "FROM_CACHE",
    "FROM_DISK",
    "STAYING",
    "STOCK",
    "SWAPPED",
    "SWITCHED",
    "WITH_LEVELS",
    "memory",
    "switching",
]

STOCK, WITH_LEVELS = "the whole model alone, stock llama.cpp", "all levels of one file (ours)"
SWAPPED, ALL_KEPT = "a file for each level, one at a time", "a file for each level, all kept"
SWITCHED, STAYING = "ours", "ours, no switch"
FROM_CACHE, FROM_DISK = "other file, page cache", "other file, disk"
COPIED = "copying units"
_DEPTH, _N_SWITCHES = 256, 40
"""Tokens of a request, and switches of ours for each load of a file: they are far shorter."""

Row = Mapping[str, Any]
_Step = Callable[[], object]


def memory(model: Path, folder: Path, n_rounds: int) -> Iterator[Row]:
    """Yield the peak memory in bytes of a new process for each way to serve all levels.

    Args:
        model: Prepared model.
        folder: Folder for a file of each level.
        n_rounds: Processes of each way.
    """
    files = [*_files(model, folder).values()]
    ways: dict[str, Callable[[], int]] = {
        STOCK: functools.partial(peak_with, [model]),
        WITH_LEVELS: functools.partial(peak_with, [model], LEVELS),
        SWAPPED: functools.partial(peak_with, files, is_swapped=True),
        ALL_KEPT: functools.partial(peak_with, files),
    }
    taken: dict[str, list[int]] = {way: [] for way in ways}
    for _ in tqdm(range(n_rounds), desc="memory", unit="round", disable=None):
        for way, peak in ways.items():
            taken[way].append(peak())
    for way, peaks in taken.items():
        yield {"row": "memory", "way": way, "bytes": peaks}


def switching(model: Path, folder: Path, n_rounds: int) -> Iterator[Row]:
    """Yield the times in seconds of each way to switch to a level.

    Args:
        model: Prepared model.
        folder: Folder for a file of each level.
        n_rounds: Loads of each file.
    """
    yield from _ours(model, n_rounds * _N_SWITCHES)
    files, blocks = _files(model, folder), blocks_of(model)
    for level, path in tqdm(files.items(), desc="switching", unit="level", disable=None):
        load = functools.partial(_load, path)
        steps: dict[str, tuple[_Step, _Step]] = {
            FROM_CACHE: (load, path.read_bytes),
            FROM_DISK: (load, functools.partial(drop_pages, path)),
            COPIED: (Gather(model, even_widths(blocks, level)), lambda: None),
        }
        taken: dict[str, list[float]] = {way: [] for way in steps}
        for _ in range(n_rounds):
            for way, step in steps.items():
                taken[way].append(seconds_of(*step))
        for way, seconds in taken.items():
            row = {"row": "switch", "way": way, "level": level, "seconds": seconds}
            yield {**row, "file_bytes": path.stat().st_size}


# -- inside --------------------------------------------------------------------------------------


def _files(model: Path, folder: Path) -> Mapping[float, Path]:
    """Return a file of each level; make those that are missing."""
    folder.mkdir(parents=True, exist_ok=True)
    blocks, found = blocks_of(model), {}
    for level in LEVELS:
        found[level] = path = folder / f"level-{round(100 * level)}.gguf"
        if not path.exists():
            partial = path.with_suffix(".partial")
            write_cut(model, even_widths(blocks, level), partial).replace(path)
    return found


def _load(path: Path) -> None:
    """Load a model, make a context, and free both."""
    with loaded(path) as model, batches(model, on(2)):
        pass


def _ours(model: Path, n_switches: int) -> Iterator[Row]:
    """Yield the times from setting a level to the next decode, with and without a switch."""
    random, last = np.random.default_rng(0), 1.0
    taken: dict[tuple[str, float], list[float]] = {}
    with contextlib.ExitStack() as stack:
        app = Switches(stack, model, _DEPTH)
        for _ in range(n_switches):
            level = float(random.choice([one for one in LEVELS if one != last]))
            for way in (SWITCHED, STAYING):
                taken.setdefault((way, level), []).append(app.request(level).before_s)
            last = level
    for (way, level), seconds in sorted(taken.items()):
        yield {"row": "switch", "way": way, "level": level, "seconds": seconds}

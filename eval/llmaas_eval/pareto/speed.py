"""Time a token and memory of each configuration, on a model with random weights.

All configurations are open at once, each in a process of its own with one thread, and take turns.
The fastest of some rounds counts: other work on the machine only makes rounds slower.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from llmaas_eval.elastic.prepared import variants
from llmaas_eval.pareto.cases import Case
from llmaas_eval.pareto.types import bytes_of
from llmaas_eval.streamed import LimitedApp
from llmaas_plugins.elastic.units import blocks_of

__all__ = ["Speed", "level_share", "speeds"]

_N_TOKENS = 4
_SETTINGS = {"n_ctx": 256, "n_batch": 64, "n_ubatch": 64, "n_threads": 1, "n_threads_batch": 1}
_ARENA = "8 MiB"
_AMPLE = "64 GiB"


class Speed(NamedTuple):
    """Time and memory of a configuration.

    Attributes:
        ms: Milliseconds a token, by round.
        memory: Bytes of weights in memory over the file's.
    """

    ms: list[float]
    memory: float


def speeds(files: Mapping[str, Path], asked: Sequence[Case], n_rounds: int) -> list[Speed]:
    """Measure configurations in turn."""
    is_streamed = any(case.share is not None for case in asked)
    process = _process_bytes(files["Q4_0"]) if is_streamed else 0
    with contextlib.ExitStack() as stack:
        apps = [
            stack.enter_context(_app(files, case, process))
            for case in tqdm(asked, desc="opening", disable=None)
        ]
        for case, app in zip(asked, apps, strict=True):
            app.generate(_N_TOKENS)  # the first tokens load weights
            if case.share is not None:
                _shrink(app, int(case.share * bytes_of(files[case.file])))
        rounds = np.empty((n_rounds, len(apps)))
        for number in tqdm(range(n_rounds), desc="timing", unit="round", disable=None):
            for i in range(len(apps))[:: 1 if number % 2 else -1]:
                rounds[number, i] = 1e3 * apps[i].generate(_N_TOKENS)
        memory = [_memory(files, case, app) for case, app in zip(asked, apps, strict=True)]
    taken = rounds.T.tolist()
    return [Speed(*one) for one in zip(taken, memory, strict=True)]


def level_share(path: Path, level: float) -> float:
    """Return the bytes of a file that has one level only, over the prepared file's."""
    found = variants(path, [level])
    variant = found.get("searched", found["uniform"])
    blocks, (widths,) = blocks_of(path), variant.levels
    return 1 - (1 - blocks.share(widths)) * blocks.n_bytes / bytes_of(path)


# -- inside --------------------------------------------------------------------------------------


def _app(files: Mapping[str, Path], case: Case, process: int) -> LimitedApp:
    path = files[case.file]
    plugins: dict[str, dict[str, Any]] = {name: dict(one) for name, one in case.plugins.items()}
    if "flash_weights" in plugins:
        budget: dict[str, Any] = {"memory_budget": _AMPLE}
        if case.share is not None:
            n_bytes = process + int(case.share * bytes_of(path))
            budget = {"memory_budget": n_bytes, "arena": _ARENA}
        plugins["flash_weights"] |= budget
    if "elastic" in plugins:
        plugins["elastic"]["level"] = case.level
    config = {"on_error": "raise", "plugins": plugins} if plugins else None
    return LimitedApp(path, None, config, _SETTINGS)


def _process_bytes(model: Path) -> int:
    """Return the memory of a process with a model, without the model's weights."""
    config = {"plugins": {"flash_weights": {"memory_budget": _AMPLE}}}
    with LimitedApp(model, None, config, _SETTINGS) as app:
        app.generate(_N_TOKENS)
        return int(app.report()["resident_bytes"]) - bytes_of(model)


def _shrink(app: LimitedApp, n_bytes: int) -> None:
    """Lower the budget of an app so that it keeps ``n_bytes`` of weights."""
    for _ in range(2):  # the process is a little smaller after the first time
        report = app.report()
        (seen,) = report["models"]
        kept = seen["kept_bytes"] + seen["prompt_kept_bytes"]
        app.set_budget(report["resident_bytes"] - kept + n_bytes)
        app.generate(_N_TOKENS)


def _memory(files: Mapping[str, Path], case: Case, app: LimitedApp) -> float:
    path = files[case.file]
    if case.level is not None:
        return level_share(path, case.level)
    if "flash_weights" not in case.plugins:
        return 1.0
    (seen,) = app.report()["models"]
    passing = 0 if case.share is None else seen["arena_bytes"] + seen["passing_bytes"]
    return float((seen["kept_bytes"] + passing) / bytes_of(path))

"""Peak memory of a process with several widths of a model, as levels or as separate files."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from llmaas_eval.batches import Batches, batches, loaded
from llmaas_plugins import activate, elastic
from llmaas_plugins.machine import peak_bytes

__all__ = ["peak_with"]

_N_PROMPT, _N_TOKENS = 512, 4


def peak_with(
    paths: Sequence[Path], levels: Sequence[float] = (), *, is_swapped: bool = False
) -> int:
    """Return the peak memory in bytes of a new process that loads and runs all of these models.

    Args:
        paths: GGUF files.
        levels: Levels to run each model at, with the plugin. Without levels, the process runs
            stock llama.cpp.
        is_swapped: Whether each model is freed before the next one is loaded.
    """
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn) as process:
        return process.submit(_peak, list(paths), list(levels), is_swapped=is_swapped).result()


def _peak(paths: list[Path], levels: list[float], *, is_swapped: bool) -> int:
    with contextlib.ExitStack() as outer:
        if levels:
            outer.enter_context(activate({"plugins": {"elastic": {}}, "on_error": "raise"}))
        stack = outer.enter_context(contextlib.ExitStack())
        for path in paths:
            if is_swapped:
                stack.close()
            context = stack.enter_context(batches(stack.enter_context(loaded(path))))
            for level in levels or [1.0]:
                with elastic.level(level):
                    _compute(context)
        return peak_bytes()


def _compute(context: Batches) -> None:
    context.clear()
    context.prefill(_N_PROMPT)
    context.generate(_N_TOKENS)

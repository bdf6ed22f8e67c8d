"""Perplexity of a configuration, measured with the llama."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from llmaas_eval.pareto.cases import Case
from llmaas_eval.sparse.ours import engine_nats
from llmaas_plugins import activate, elastic

__all__ = ["quality"]

Windows = NDArray[np.int64]


def quality(files: Mapping[str, Path], case: Case, windows: Windows, n_prompt: int) -> list[float]:
    """Return the mean -log p of the tokens after each window's first ``n_prompt``, by window.

    In the sparse mode, the first tokens are the prompt, which is computed with all values.
    """
    path, name = files[case.file], f"{case.family}, {case.setting}"
    table = case.plugins.get("flash_weights", {})
    if "sparsity" in table:
        found = engine_nats(path, windows, table["sparsity"], table["selection"], n_prompt)
        return [float(each) for each in found.mean(1)]
    return _plain(path, case, windows, n_prompt, name)


def _plain(path: Path, case: Case, windows: Windows, n_prompt: int, name: str) -> list[float]:
    from llama_cpp import Llama

    n_ctx = windows.shape[1]
    plugins = {key: dict(table) for key, table in case.plugins.items() if key == "elastic"}
    threads = {"n_threads": 1, "n_threads_batch": 1}
    level = contextlib.nullcontext() if case.level is None else elastic.level(case.level)
    with (
        activate({"on_error": "raise", "plugins": plugins}),
        contextlib.closing(
            Llama(str(path), n_ctx=n_ctx, logits_all=True, verbose=False, **threads)
        ) as llama,
        level,
    ):
        each = tqdm(windows, desc=name, unit="window", disable=None)
        return [_mean_nats(llama, window, n_prompt) for window in each]


def _mean_nats(llama: Any, window: NDArray[np.int64], n_prompt: int) -> float:
    llama.reset()
    llama.eval(window[:-1].tolist())
    logits = np.array(llama.scores[n_prompt : len(window) - 1], np.float64)
    own = logits[np.arange(len(logits)), window[n_prompt + 1 :]]
    return float((np.logaddexp.reduce(logits, axis=-1) - own).mean())

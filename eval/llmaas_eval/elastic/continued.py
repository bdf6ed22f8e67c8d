"""Contexts that begin at one level, are stored on disk, and continue at another level.

``kv_chunks`` stores the beginning of each window, then the suite is closed. Another activation
restores it from disk and evaluates the rest, with an app's ``Llama`` and the real plugins.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from llmaas_eval.elastic.readings import Reading, read_window
from llmaas_eval.elastic.texts import Windows
from llmaas_plugins import activate, elastic
from llmaas_plugins.kv_chunks.store.chunk_ids import CHUNK_TOKENS
from llmaas_plugins.model.forward import log_softmax

__all__ = ["continued"]


def continued(
    path: Path, windows: Windows, levels: Sequence[float], folder: Path
) -> Iterator[tuple[float, float, Reading]]:
    """Yield the first level, the second level, and the reading of the windows' last quarters.

    Args:
        path: A prepared file.
        windows: Test text.
        levels: Levels of which all pairs are measured. The reference for all pairs is the first
            level throughout.
        folder: Folder for the stored contexts.

    Raises:
        RuntimeError: Some tokens were not restored from disk.
    """
    n_kept = windows.shape[1] * 3 // 4 // CHUNK_TOKENS * CHUNK_TOKENS
    full: list[NDArray[np.float32]] = []
    for before in levels:
        store = folder / f"begun at {before}"
        with _app(path, store, windows.shape[1]) as (llama, _):
            for window in windows:
                _read(llama, window[:n_kept], before)
        for then in levels:
            copy = Path(shutil.copytree(store, folder / "going on"))
            name, found = f"{before:.0%}, then {then:.0%}", []
            with _app(path, copy, windows.shape[1]) as (llama, suite):
                for i, window in enumerate(tqdm(windows, name, unit="window", disable=None)):
                    log_p = _read(llama, window[:-1], then)[n_kept:]
                    if (before, then) == (levels[0], levels[0]):
                        full.append(log_p)
                    found.append(read_window(full[i], log_p, window[n_kept + 1 :]))
                n_read = suite.status()["plugins"]["kv_chunks"]["disk_hits"] * CHUNK_TOKENS
            if n_read != n_kept * len(windows):
                raise RuntimeError(f"only {n_read} tokens of {name} came from the disk")
            shutil.rmtree(copy)
            yield before, then, Reading(*np.array(found).T)
        shutil.rmtree(store)


@contextlib.contextmanager
def _app(path: Path, store: Path, n_ctx: int) -> Iterator[tuple[Any, Any]]:
    from llama_cpp import Llama

    kept = {"codec": "lossless", "recompute": False, "store": str(store)}
    config = {"on_error": "raise", "plugins": {"elastic": {}, "kv_chunks": kept}}
    settings = {"n_ctx": n_ctx, "n_batch": n_ctx, "n_ubatch": n_ctx, "flash_attn": True}
    threads = {"n_threads": 1, "n_threads_batch": 1}
    with (
        activate(config) as suite,
        contextlib.closing(
            Llama(str(path), logits_all=True, verbose=False, **settings, **threads)
        ) as llama,
    ):
        yield llama, suite


def _read(llama: Any, tokens: NDArray[np.int32], level: float) -> NDArray[np.float32]:
    """Return log probabilities after each token; rows of restored tokens are not computed."""
    with elastic.level(level):
        next(llama.generate(tokens.tolist(), temp=0.0))
    return log_softmax(np.asarray(llama.scores[: len(tokens)]))

"""Perplexity of the engine's own sparse tokens, to compare with the oracle's."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from llmaas_eval.sparse.texts import Tokens
from llmaas_patches.native.packing import model_tensors
from llmaas_plugins import activate
from llmaas_plugins.flash_weights.calibration import Calibration, Calibrator
from llmaas_plugins.flash_weights.channel_layout import channel_operands
from llmaas_plugins.flash_weights.channels import channel_path, write_channels
from llmaas_plugins.model.loading import loaded

__all__ = ["add_channels", "engine_nats", "engine_perplexity", "opened", "with_channels"]


def with_channels(model: Path, folder: Path, calibration: Tokens) -> Path:
    """Copy a model into ``folder`` and add a channel file; return the copy's path.

    The channel file is calibrated on the windows ``calibration``.
    """
    path = Path(shutil.copyfile(model, folder / model.name))
    add_channels(path, calibration)
    return path


def add_channels(model: Path, calibration: Tokens, group_layers: int = 1) -> None:
    """Write a model's channel file, calibrated on the windows ``calibration``."""
    found, path = _calibrated(model, calibration), channel_path(model)
    for _ in write_channels(model, path, model_tensors(model), found, group_layers=group_layers):
        pass


def _calibrated(path: Path, windows: Tokens) -> Calibration:
    calibrator = Calibrator()
    with (
        activate({"on_error": "raise", "plugins": {}}, {"calibrator": calibrator}),
        loaded(path) as model,
    ):
        operands = channel_operands(model_tensors(path))
        text = windows.reshape(-1).astype(np.int32)
        return calibrator.calibrate(model.model, operands, text, n_tokens=len(text))


def engine_perplexity(
    model: Path, windows: Tokens, sparsity: float, selection: str, n_dense: int = 1
) -> float:
    """Return perplexity over the tokens after each window's first ``n_dense``."""
    return float(np.exp(engine_nats(model, windows, sparsity, selection, n_dense).mean()))


def engine_nats(
    model: Path, windows: Tokens, sparsity: float, selection: str, n_dense: int = 1
) -> NDArray[np.float64]:
    """Return -log p of the tokens after each window's first ``n_dense``, one row a window.

    These first tokens are one batch, so they are computed with all channels.
    """
    table = {"mode": "sparse", "sparsity": sparsity, "selection": selection.replace("-", "_")}
    what = f"engine, {selection} {sparsity}"
    with opened(model, table, windows.shape[1]) as (llama, flash):
        each = tqdm(windows, desc=what, unit="window", disable=None)
        return np.array([_nats(llama, flash, window, n_dense)[n_dense:] for window in each])


@contextlib.contextmanager
def opened(model: Path, table: dict[str, Any], n_ctx: int) -> Iterator[tuple[Any, Any]]:
    """Open a model on one thread with logits of all tokens; yield it and the plugin.

    Args:
        model: GGUF file.
        table: Settings of ``flash_weights``.
        n_ctx: Length of the context in tokens.
    """
    from llama_cpp import Llama

    config = {"on_error": "raise", "plugins": {"flash_weights": table}}
    settings = {"n_ctx": n_ctx, "n_threads": 1, "n_threads_batch": 1, "logits_all": True}
    with (
        activate(config) as suite,
        contextlib.closing(Llama(str(model), verbose=False, **settings)) as llama,
    ):
        yield llama, suite.plugin("flash_weights")


def _nats(llama: Any, flash: Any, window: NDArray[np.int64], n_dense: int) -> NDArray[np.float64]:
    llama.reset()
    llama.eval(window[:n_dense].tolist())
    with flash.answer(llama):
        for token in window[n_dense:-1].tolist():
            llama.eval([token])
    logits = np.array(llama.scores[: len(window) - 1], np.float64)
    own = logits[np.arange(len(logits)), window[1:]]
    return np.asarray(np.logaddexp.reduce(logits, axis=-1) - own)

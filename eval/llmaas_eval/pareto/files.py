"""Model files of the study: the reference model's for quality, a random model's for time."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from gguf import GGMLQuantizationType
from numpy.typing import NDArray

from llmaas_eval.elastic.prepared import write_uniform
from llmaas_eval.elastic.random_adapters import write_random_adapters
from llmaas_eval.models import Shape, write_random_model
from llmaas_eval.pareto.cases import F16, Choices
from llmaas_eval.pareto.types import flat_importance, importance, typed
from llmaas_eval.sparse.ours import add_channels
from llmaas_eval.weights import kept_f16_copy
from llmaas_patches.native.packing import model_tensors, repack
from llmaas_plugins.cli.main import main as llmaas
from llmaas_plugins.elastic.units import Calibration, Scores, blocks_of
from llmaas_plugins.flash_weights.channels import channel_path
from llmaas_plugins.flash_weights.packed import packed_path, write_packed

__all__ = ["Learning", "quality_files", "speed_files"]

Files = Mapping[str, Path]
"""Model files by the keys of ``Case.file``."""

_RANK = 8
_SPREAD = {"attn_qkv": 0.27, "attn_output": 0.62, "ffn_up": 0.18, "ffn_down": 0.35}
"""Spread of the channels' activity in the reference model, which ``llmaas_eval.sparse`` measured.
"""


class Learning(NamedTuple):
    """Text to learn from, and how much of it.

    Attributes:
        text: File with the text.
        windows: Windows of it, for importance matrices.
        n_distilled: Tokens to distill on.
        n_recovered: Tokens to recover each level on.
        searches: Whether to search the levels' widths.
        data: Folder of the data sets, for LLM-Pruner's importance.
    """

    text: Path
    windows: NDArray[np.int64]
    n_distilled: int
    n_recovered: int
    searches: bool
    data: Path


def quality_files(
    model: Path, choices: Choices, learning: Learning, folder: Path, n_threads: int
) -> Files:
    """Make those files of a model that are missing.

    Args:
        model: GGUF file.
        choices: Configurations to compare.
        learning: Text to learn from, and how much of it.
        folder: Folder for the files.
        n_threads: Threads of llama.cpp's quantizer.
    """
    source = kept_f16_copy(model, folder)
    weights = importance(source, list(learning.windows))

    def made(origin: Path, name: str) -> Path:
        return typed(origin, folder / f"{origin.stem}-{name}.gguf", name, weights, n_threads)

    files = {F16: source} | {name: made(source, name) for name in choices.types}
    for key, command in (("equal", _EQUAL), ("distilled", _distilling(learning))):
        files[key] = _with_channels(
            files["Q4_0"], folder / key, [*command, "--text", learning.text]
        )
    files["levels"] = made(_prepared(source, learning, folder), "Q4_0")
    _recover(files["levels"], choices.levels, learning)
    if choices.with_pruned:
        files["pruned"] = made(_pruned(source, learning.data, folder), "Q4_0")
    return files


def speed_files(shape: Shape, types: Sequence[str], folder: Path, n_threads: int) -> Files:
    """Make those files of a random model that are missing.

    Args:
        shape: Shape of the model.
        types: Keys in ``TYPES``.
        folder: Folder for the files.
        n_threads: Threads of llama.cpp's quantizer.
    """
    source = folder / "random-f16.gguf"
    if not source.exists():
        write_random_model(source, shape, GGMLQuantizationType.F16, spread=_SPREAD)
    weights = flat_importance(source)
    files = {F16: source}
    for name in types:
        files[name] = typed(source, folder / f"random-{name}.gguf", name, weights, n_threads)
    sparse = _linked(files["Q4_0"], folder / "sparse")
    for path in (files["Q4_0"], sparse):
        if not packed_path(path).exists():
            list(write_packed(path, packed_path(path), model_tensors(path), repack))
    if not channel_path(sparse).exists():
        add_channels(sparse, np.random.default_rng(0).integers(300, 4000, (2, 64)))
    levels = folder / "random-levels.gguf"
    if not levels.exists():
        plain = write_uniform(files["Q4_0"], folder / "random-plain.gguf", _random(files["Q4_0"]))
        shutil.copyfile(plain, partial := levels.with_suffix(".partial.gguf"))
        write_random_adapters(partial, _RANK)
        partial.replace(levels)
    return files | {"equal": sparse, "distilled": sparse, "levels": levels, "pruned": levels}


# -- inside --------------------------------------------------------------------------------------

_EQUAL = ("flash", "pack", "--sparse", "--equal-shares")


def _distilling(learning: Learning) -> Sequence[str]:
    return "flash", "distill", "--tokens", str(learning.n_distilled)


def _with_channels(model: Path, folder: Path, command: Sequence[object]) -> Path:
    path = _linked(model, folder)
    if not channel_path(path).exists():
        _run("flash", "pack", path)
        _run(*command[:2], path, *command[2:])
    return path


def _linked(model: Path, folder: Path) -> Path:
    """Return another name of a model file, beside which a channel file of its own can be."""
    folder.mkdir(exist_ok=True)
    path = folder / model.name
    if not path.exists():
        os.link(model, path)
    return path


def _prepared(source: Path, learning: Learning, folder: Path) -> Path:
    path = folder / "levels.gguf"
    if not path.exists():
        options = ["--text", learning.text, *([] if learning.searches else ["--no-search"])]
        _run("elastic", "prepare", source, "-o", path, *options)
    return path


def _recover(prepared: Path, levels: Sequence[float], learning: Learning) -> None:
    done = prepared.with_suffix(".recovered")
    if not done.exists():
        asked = ",".join(map(str, levels))
        options = ["--text", learning.text, "--tokens", learning.n_recovered]
        _run("elastic", "recover", prepared, "--levels", asked, *options)
        done.touch()


def _pruned(source: Path, data: Path, folder: Path) -> Path:
    from llmaas_eval.recovery.llm_pruner import main

    path = folder / "pruned.gguf"
    if not path.exists():
        with contextlib.redirect_stdout(sys.stderr):
            main(["--model", str(source), "--out", str(path), "--data", str(data)])
    return path


def _random(model: Path) -> Scores:
    """Return random scores: with random weights, one order of the units is as good as another."""
    blocks, rng = blocks_of(model), np.random.default_rng(0)
    groups = rng.random((blocks.n_layers, blocks.n_groups))
    neurons = rng.random((blocks.n_layers, blocks.n_ff))
    return Scores(groups, neurons, Calibration("", 0, 0, "random"))


def _run(*arguments: object) -> None:
    """Run a command of ``llmaas``; what it prints goes to standard error."""
    with contextlib.redirect_stdout(sys.stderr):
        code = llmaas([*map(str, arguments)])
    if code:
        raise RuntimeError(f"`llmaas {arguments[0]} {arguments[1]}` returned {code}, expected 0")

"""Measure all configurations; each result is kept, so a study that was stopped goes on."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmaas_eval.measured import measured_once
from llmaas_eval.models import Shape
from llmaas_eval.pareto.cases import F16, Case, Choices, cases
from llmaas_eval.pareto.files import Learning, quality_files, speed_files
from llmaas_eval.pareto.quality import quality
from llmaas_eval.pareto.speed import level_share, speeds
from llmaas_eval.pareto.types import bits_of, bytes_of
from llmaas_plugins.flash_weights.channels import channel_path
from llmaas_plugins.model.digest import file_digest

__all__ = ["Material", "Row", "study"]

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Material:
    """Models, text and settings of the study.

    Attributes:
        model: GGUF file whose perplexity is measured.
        shape: Shape of the random model whose time is measured.
        windows: Text that was held out, ``(n_windows, n_tokens)``.
        n_prompt: First tokens of each window, which do not count.
        learning: Text to learn from, and how much of it.
        n_rounds: Rounds of timing.
        folder: Folder for files and results.
        n_threads: Threads of llama.cpp's quantizer.
    """

    model: Path
    shape: Shape
    windows: NDArray[np.int64]
    n_prompt: int
    learning: Learning
    n_rounds: int
    folder: Path
    n_threads: int


def study(material: Material, choices: Choices) -> list[Row]:
    """Return a row for each configuration."""
    asked = list(cases(choices))
    own, random = material.folder / "quality", material.folder / "speed"
    for folder in (own, random):
        folder.mkdir(parents=True, exist_ok=True)
    files = quality_files(material.model, choices, material.learning, own, material.n_threads)
    nats = [_nats(material, files, case) for case in asked]
    others = speed_files(material.shape, choices.types, random, material.n_threads)
    identity = [asked, material.n_rounds, str(material.shape)]

    def measure() -> Sequence[Any]:
        return [*speeds(others, asked, material.n_rounds)]

    taken = measured_once(material.folder, identity, measure)
    whole = bytes_of(files[F16])
    return [
        {
            "family": case.family,
            "setting": case.setting,
            "bits": bits_of(files[case.file]),
            "memory": _memory(files, case, memory) * bytes_of(files[case.file]) / whole,
            "nats": found,
            "ms": ms,
        }
        for case, found, (ms, memory) in zip(asked, nats, taken, strict=True)
    ]


# -- inside --------------------------------------------------------------------------------------


def _memory(files: Mapping[str, Path], case: Case, measured: float) -> float:
    """Return the weights in memory over the file's: computed for levels, measured for others."""
    return measured if case.level is None else level_share(files[case.file], case.level)


def _nats(material: Material, files: Mapping[str, Path], case: Case) -> list[float]:
    """Return the losses of a configuration. Memory does not change them."""
    path, channels = files[case.file], channel_path(files[case.file])
    same = {} if case.family == "exact" else case.plugins  # bit-identical to llama.cpp
    about = [
        file_digest(path),
        file_digest(channels) if channels.exists() else "",
        same,
        case.level,
        material.n_prompt,
        hashlib.sha256(np.ascontiguousarray(material.windows, "<i8").tobytes()).hexdigest(),
    ]

    def measure() -> Sequence[float]:
        return quality(files, case, material.windows, material.n_prompt)

    return list(measured_once(material.folder, about, measure))

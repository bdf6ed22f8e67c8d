"""Random model whose levels are measured, for times only."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from llmaas_eval.elastic.prepared import write_uniform
from llmaas_eval.models import Shape, write_random_model
from llmaas_plugins.elastic.units import Calibration, Scores, blocks_of

__all__ = ["write_model"]


def write_model(folder: Path, shape: Shape) -> Path:
    """Write a random model with the paper's uniform widths."""
    source = write_random_model(folder / "random.gguf", shape)
    blocks = blocks_of(source)
    scores = Scores(
        np.zeros((blocks.n_layers, blocks.n_groups)),
        np.zeros((blocks.n_layers, blocks.n_ff)),
        Calibration("0" * 64, 0, 0, "none"),
    )
    return write_uniform(source, folder / "random.elastic.gguf", scores)

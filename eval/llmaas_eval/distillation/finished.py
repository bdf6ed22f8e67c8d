"""Judge a finished channel file by the learner's computation and by the engine's own tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from llmaas_eval.sparse.oracle import SELECTIONS
from llmaas_eval.sparse.ours import engine_nats
from llmaas_patches.native.packing import model_tensors
from llmaas_plugins.flash_weights.channel_layout import channel_operands
from llmaas_plugins.flash_weights.channels import channel_path, open_channels
from llmaas_plugins.training.distillation import judge, read_channels
from llmaas_plugins.training.sparse_student import MaskedTeacher, SparseStudent, grids_in

__all__ = ["finished"]

Row = Mapping[str, Any]
Windows = NDArray[np.int32]


def finished(
    model: Path, kinds: Mapping[str, Windows], sparsities: Sequence[float], n_prompt: int
) -> list[Row]:
    """Return a row for each kind of text and sparsity.

    It has the losses (mean nats) of each window under the whole model, in the sparse mode without
    a channel file's training and shares, with the channel file, and in the engine by selection.
    The learner selects values as the engine's ``top-k``.

    Args:
        model: Model file, with its channel file beside it.
        kinds: Windows to judge by, by kind of text.
        sparsities: Sparsities to judge at.
        n_prompt: First tokens of each window that are computed with all values.
    """
    tensors = model_tensors(model)
    operands = channel_operands(tensors)
    file = open_channels(channel_path(model), model, tensors)
    student = SparseStudent(MaskedTeacher(model), grids_in(model, operands, tensors))

    def judged(windows: Windows) -> Any:
        total = len(sparsities) * windows.size
        with tqdm(desc="judging", total=total, unit="token", unit_scale=True, disable=None) as bar:
            return judge(student, windows, n_prompt, sparsities, bar.update)

    before = {kind: judged(windows) for kind, windows in kinds.items()}
    read_channels(student, file)
    after = {kind: judged(windows) for kind, windows in kinds.items()}

    def in_engine(kind: str, sparsity: float, way: str) -> list[float]:
        nats = engine_nats(model, kinds[kind].astype(np.int64), sparsity, way, n_prompt)
        return [float(each) for each in nats.mean(1)]

    return [
        {
            "kind": kind,
            "sparsity": sparsity,
            "distilled": None if file.distilled is None else str(file.distilled),
            "whole": [one.whole for one in after[kind][sparsity]],
            "none": [one.loss for one in before[kind][sparsity]],
            "file": [one.loss for one in after[kind][sparsity]],
            "engine": {way: in_engine(kind, sparsity, way) for way in SELECTIONS},
        }
        for kind in kinds
        for sparsity in sparsities
    ]

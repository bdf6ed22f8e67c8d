"""``python -m llmaas_eval.learning_times``: time and memory of learning for a 1 B and an 8 B model.

It measures a step of ``llmaas elastic recover`` and of ``llmaas flash distill`` with random models
of one and of two layers, so it knows what a layer takes, and what all else takes. It extrapolates
to all layers and to a vocabulary of 128,256 tokens, and prints JSON for ``llmaas_eval.results``.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from llmaas_eval.elastic.prepared import write_uniform
from llmaas_eval.learning import has_torch, record
from llmaas_eval.models import SHAPE_1B, Shape, write_random_model
from llmaas_plugins.elastic.units import Calibration, Scores, blocks_of

__all__ = ["main"]

_SHAPE_8B = Shape(n_layer=32, n_embd=4096, n_head=32, n_head_kv=8, n_ff=14336, n_ctx=8192)
_SHAPES = {"1 B": SHAPE_1B, "8 B": _SHAPE_8B}
_TINY = {
    name: replace(shape, n_embd=256, n_head=4, n_head_kv=2, n_ff=512)
    for name, shape in _SHAPES.items()
}
_N_VOCAB, _SLICE = 128_256, 8_192
_WINDOW, _N_ROWS = 512, 2
_RECOVER_TOKENS, _N_LEVELS, _DISTILL_TOKENS = 262_144, 8, 1_048_576


class _Step(NamedTuple):
    """Processor seconds of a step of ``_N_ROWS`` windows.

    Attributes:
        recover: Mean of the widest and the narrowest level.
        distill: Step at the sparsity of the first step.
    """

    recover: float
    distill: float


def main(argv: list[str] | None = None) -> int:
    """Measure, extrapolate and print JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m llmaas_eval.learning_times",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="tiny layers, as a check only")
    args = parser.parse_args(argv)
    if not has_torch():
        return 1
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, shape in (_TINY if args.quick else _SHAPES).items():
            rows.append(_row(name, shape, Path(folder)))
    json.dump({"about": record(), "rows": rows}, sys.stdout, indent=2)
    sys.stdout.write("\n")
    return 0


# -- internals -----------------------------------------------------------------------------------


def _row(name: str, shape: Shape, folder: Path) -> dict[str, Any]:
    """Return the hours of processor time of both commands with their default numbers of tokens."""
    one, two = (_step(replace(shape, n_layer=n), folder) for n in (1, 2))
    words = _vocabulary_seconds(shape.n_embd)
    steps = _Step(
        *(
            first + (second - first) * (shape.n_layer - 1) + words
            for first, second in zip(one, two, strict=True)
        )
    )
    n_tokens = _N_ROWS * _WINDOW
    return {
        "model": name,
        "recover_step_s": steps.recover,
        "distill_step_s": steps.distill,
        "recover_hours": steps.recover * _N_LEVELS * _RECOVER_TOKENS / n_tokens / 3600,
        "distill_hours": steps.distill * _DISTILL_TOKENS / n_tokens / 3600,
    }


def _step(shape: Shape, folder: Path) -> _Step:
    model = write_random_model(folder / "random.gguf", shape)
    windows = np.random.default_rng(0).integers(0, 256, (_N_ROWS, _WINDOW), dtype=np.int32)
    return _Step(_recover_step(model, folder, windows), _distill_step(model, windows))


def _recover_step(model: Path, folder: Path, windows: np.ndarray[Any, Any]) -> float:
    """Return the processor seconds of a step of ``recover``, the mean of two levels."""
    from llmaas_plugins.elastic.metadata import read_elastic
    from llmaas_plugins.training.costs import step_seconds
    from llmaas_plugins.training.objectives import Objective
    from llmaas_plugins.training.recovery import Recipe
    from llmaas_plugins.training.student import Level, Teacher

    blocks = blocks_of(model)
    scores = Scores(
        np.zeros((blocks.n_layers, blocks.n_groups)),
        np.zeros((blocks.n_layers, blocks.n_ff)),
        Calibration("0" * 64, 0, 0, "none"),
    )
    elastic = read_elastic(write_uniform(model, folder / "prepared.gguf", scores))
    assert elastic is not None
    teacher, recipe = Teacher(model), Recipe(_RECOVER_TOKENS)
    objective = Objective(teacher, recipe.loss)
    levels = elastic.tables["uniform"][1], elastic.tables["uniform"][-1]
    steps = (
        functools.partial(step_seconds, Level(teacher, widths, recipe.rank), objective, windows)
        for widths in levels
    )
    return sum(map(_used, steps)) / len(levels)


def _distill_step(model: Path, windows: np.ndarray[Any, Any]) -> float:
    """Return the processor seconds of a step of ``distill``."""
    from llmaas_patches.native.packing import model_tensors
    from llmaas_plugins.flash_weights.channel_layout import channel_operands
    from llmaas_plugins.training.costs import step_seconds
    from llmaas_plugins.training.distillation import SparseRecipe
    from llmaas_plugins.training.objectives import Objective
    from llmaas_plugins.training.sparse_student import MaskedTeacher, SparseStudent, grids_in

    tensors = model_tensors(model)
    recipe, teacher = SparseRecipe(_DISTILL_TOKENS), MaskedTeacher(model)
    student = SparseStudent(teacher, grids_in(model, channel_operands(tensors), tensors))
    teacher.mask = recipe.mask(recipe.sparsity_at(0))
    objective = Objective(teacher, recipe.loss, recipe.n_prompt)
    return _used(lambda: step_seconds(student, objective, windows, recipe.n_prompt))


def _vocabulary_seconds(n_embd: int) -> float:
    """Return the processor seconds of a step's logits, of the whole model and of the student."""
    import torch
    from torch.nn import functional

    positions, words = torch.randn(_N_ROWS * _WINDOW, n_embd), torch.randn(_SLICE, n_embd)

    def compare() -> None:
        outputs = positions.clone().requires_grad_()
        expected = functional.log_softmax(functional.linear(positions, words), -1)
        found = functional.log_softmax(functional.linear(outputs, words), -1)
        functional.kl_div(found, expected, reduction="sum", log_target=True).backward()

    compare()
    return _used(compare) * _N_VOCAB / _SLICE


def _used(step: Callable[[], object]) -> float:
    """Return the processor seconds that a function takes, on all threads together."""
    started = time.process_time()
    step()
    return time.process_time() - started


if __name__ == "__main__":
    sys.exit(main())

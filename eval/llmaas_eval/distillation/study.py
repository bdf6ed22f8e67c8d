"""Train every arm, and judge it at every sparsity by the numbers that the channel file stores.

Each result is a file of its own, so a study that was stopped goes on where it was.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from llmaas_eval.distillation.rivals import Weighted, block_shares
from llmaas_hooks import TensorInfo
from llmaas_plugins.cli.flash.sharing import shares_on
from llmaas_plugins.flash_weights.channel_layout import channel_operands
from llmaas_plugins.flash_weights.model_weights import digest_of
from llmaas_plugins.flash_weights.operands import Operand
from llmaas_plugins.flash_weights.shares import Shares, equal_share
from llmaas_plugins.training.distillation import SparseRecipe, distill, judge, run_identity
from llmaas_plugins.training.objectives import Quality
from llmaas_plugins.training.sparse_student import MaskedTeacher, SparseStudent, grids_in
from llmaas_plugins.training.trainer import Kept

__all__ = ["ARMS", "USED", "Material", "Row", "study"]

Row = Mapping[str, Any]
Windows = NDArray[np.int32]

USED = (0.4, 0.5, 0.6, 0.7, 0.8)
"""Sparsities to judge at."""


class Arm(NamedTuple):
    """A way to lose less in the sparse mode.

    Attributes:
        changes: Changes of the recipe; None trains nothing.
        shares: Which share each activation leaves out: ``equal`` ones, those that cost least ``by
            loss``, or TEAL's ``by block``.
        is_weighted: Whether the norms of columns count for which values are left out (WINA).
    """

    changes: Mapping[str, Any] | None
    shares: Literal["equal", "by loss", "by block"] = "equal"
    is_weighted: bool = False


_STRAIGHT = {"is_straight": True}
"""Gradients as in ActiveFlow."""

ARMS: Mapping[str, Arm] = {
    "none": Arm(None),
    "own shares": Arm(None, "by loss"),
    "TEAL's shares": Arm(None, "by block"),
    "column norms": Arm(None, is_weighted=True),
    "own shares, column norms": Arm(None, "by loss", is_weighted=True),
    "own shares, drawn": Arm(_STRAIGHT, "by loss"),
    "drawn": Arm(_STRAIGHT),
    "fixed 50 %": Arm({**_STRAIGHT, "sparsity": 0.5}),
    "fixed 60 %": Arm({**_STRAIGHT, "sparsity": 0.6}),
    "fixed 70 %": Arm({**_STRAIGHT, "sparsity": 0.7}),
    "fixed 80 %": Arm({**_STRAIGHT, "sparsity": 0.8}),
    "next token": Arm({**_STRAIGHT, "loss": "next-token"}),
    "not straight through": Arm({}),
    "own shares, not straight through": Arm({}, "by loss"),
    "prompts sparse, too": Arm({**_STRAIGHT, "n_prompt": 0}),
}
"""Arms by name; ``own shares, not straight through`` is the default of ``llmaas flash distill``.
The others draw the sparsity and pass gradients straight through, unless their names say something
else. All are judged with dense prompts.
"""
_N_SHARE_WINDOWS = 4


@dataclass(frozen=True, slots=True)
class Material:
    """Model, texts and settings of the study.

    Attributes:
        model: Model file.
        tensors: Its tensors.
        training: Windows to learn from.
        kinds: Windows to judge by, by kind of text.
        recipe: How to learn.
        folder: Folder of results and of runs that were stopped.
    """

    model: Path
    tensors: Mapping[str, TensorInfo]
    training: Windows
    kinds: Mapping[str, Windows]
    recipe: SparseRecipe
    folder: Path


def study(material: Material, arms: Sequence[str]) -> list[Row]:
    """Return a row for each arm, sparsity and kind of text."""
    material.folder.mkdir(parents=True, exist_ok=True)
    rows = list[Row]()
    for arm in arms:
        path = material.folder / f"{_identity(material, arm)[:24]}.json"
        if not path.exists():
            found = _measured(material, arm)
            partial = path.with_suffix(".partial")
            partial.write_text(json.dumps(found), encoding="utf-8")
            partial.replace(path)
        rows += json.loads(path.read_text(encoding="utf-8"))
    return rows


def _measured(material: Material, arm: str) -> list[Row]:
    operands = channel_operands(material.tensors)
    grids = grids_in(material.model, operands, material.tensors)
    kind = Weighted if ARMS[arm].is_weighted else MaskedTeacher
    student = SparseStudent(kind(material.model), grids)
    started = time.monotonic()
    shares = _shares(material, arm, student, operands)
    student.teacher.share_by(shares)
    n_tokens = _train(material, arm, shares, student)
    about = {"arm": arm, "n_tokens": n_tokens, "seconds": time.monotonic() - started}
    return [
        about | {"sparsity": sparsity, "kind": kind, **_readings(found)}
        for kind, windows in material.kinds.items()
        for sparsity, found in judge(student, windows, material.recipe.n_prompt, USED).items()
    ]


def _shares(
    material: Material, arm: str, student: SparseStudent, operands: Sequence[Operand]
) -> Shares:
    windows, way = list(material.training[:_N_SHARE_WINDOWS]), ARMS[arm].shares
    if way == "by loss":
        return shares_on(student.teacher, windows, operands, material.tensors)
    if way == "by block":
        return block_shares(student, windows, operands, material.tensors)
    return {operand: equal_share() for operand in operands}


def _train(material: Material, arm: str, shares: Shares, student: SparseStudent) -> int:
    """Train an arm, and return the number of tokens."""
    changes = ARMS[arm].changes
    if changes is None:
        return 0
    recipe = replace(material.recipe, **changes)
    identity = run_identity(digest_of(material.model), material.training, shares, recipe)
    kept = Kept(material.folder / f"{identity[:24]}.npz", identity)
    with tqdm(desc=arm, unit="token", unit_scale=True, disable=None) as bar:
        distill(student, material.training, recipe, kept=kept, progress=bar.update)
    kept.path.unlink()
    return recipe.n_trained(material.training.shape[1])


def _identity(material: Material, arm: str) -> str:
    """Return the SHA-256 of everything that an arm's results depend on."""
    text = np.ascontiguousarray(material.training, "<i4").tobytes()
    kinds = {
        kind: hashlib.sha256(np.ascontiguousarray(each, "<i4").tobytes()).hexdigest()
        for kind, each in material.kinds.items()
    }
    run = [digest_of(material.model), hashlib.sha256(text).hexdigest(), material.training.shape]
    about = [run, arm, ARMS[arm], asdict(material.recipe), kinds, USED]
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


def _readings(found: Sequence[Quality]) -> dict[str, list[float]]:
    """Return the windows' qualities by name."""
    return {name: [getattr(one, name) for one in found] for name in Quality._fields}

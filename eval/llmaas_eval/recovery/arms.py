"""Arms of the study: what is trained at a level, and by which loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from llmaas_plugins.elastic.torch_model import Weights
from llmaas_plugins.elastic.units import Widths, all_units
from llmaas_plugins.training import closed_form
from llmaas_plugins.training.batches import Batches
from llmaas_plugins.training.objectives import Objective
from llmaas_plugins.training.recovery import Recipe
from llmaas_plugins.training.student import Level, Teacher, dimensions_of
from llmaas_plugins.training.trainer import Kept, Settings, train

__all__ = ["ARMS", "Arm", "AtPapersMatrices", "Gains", "Nested", "learned"]

Windows = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Arm:
    """Way to recover a level.

    Attributes:
        loss: Loss to train with; empty for no training.
        is_fitted: Whether to start from the closed form.
        trains: Parameters that are trained: ``adapters``, ``paper's`` for adapters at ElastiLM's
            matrices, ``gains``, or ``nested`` for one adapter of all widths.
        share: Share of the study's tokens to train on.
    """

    loss: str = "kl"
    is_fitted: bool = True
    trains: str = "adapters"
    share: float = 1.0


ARMS: Mapping[str, Arm] = {
    "none": Arm(loss="", is_fitted=False),
    "closed form": Arm(loss=""),
    "KL": Arm(),
    "KL, not from the closed form": Arm(is_fitted=False),
    "KL, a quarter of the tokens": Arm(share=0.25),
    "KL, half of the tokens": Arm(share=0.5),
    "KL, the paper's matrices": Arm(is_fitted=False, trains="paper's"),
    "next token": Arm(loss="next-token"),
    "next token, the paper's matrices": Arm("next-token", is_fitted=False, trains="paper's"),
    "norms and biases": Arm(is_fitted=False, trains="gains"),
    "one nested adapter": Arm(is_fitted=False, trains="nested"),
}
"""Arms by name. At level 1.0, only ``next token`` learns anything: it is the control that shows
what more training on the text brings without any loss to recover.
"""


class AtPapersMatrices(Level):
    """A level with adapters where ElastiLM has them (§3.2), keys and values included.

    Cells of such levels are not valid at other levels.
    """

    adapted = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_up", "ffn_down")


class Gains(Level):
    """A level whose norms, and biases of the matrices that read units, are trained."""

    def __init__(self, teacher: Teacher, widths: Widths) -> None:
        """Start from the whole model's norms, and from biases of 0."""
        super().__init__(teacher, widths, 1)
        self.adapters = nn.ParameterDict()
        for layer in range(teacher.blocks.n_layers):
            found = teacher.weights(layer)
            trained = {name: each for name, each in found.items() if name.endswith("norm.weight")}
            for name in ("attn_output.bias", "ffn_down.bias"):
                zeros = torch.zeros(teacher.blocks.n_embd, device=teacher.device)
                trained[name] = found.get(name, zeros)
            for name, start in trained.items():
                key = f"{layer}:{name}".replace(".", "/")  # torch allows no dots
                self.adapters[key] = nn.Parameter(start.clone())

    def weights(self, layer: int) -> Weights:
        """Return the level's part of the weights, with the trained norms and biases."""
        prefix = f"{layer}:"
        trained = {
            name.removeprefix(prefix).replace("/", "."): weight
            for name, weight in self.adapters.items()
            if name.startswith(prefix)
        }
        return {**self.narrowed(layer), **trained}


class Nested(nn.Module):
    """One adapter for all widths: a level uses the first columns of A and the first rows of B.

    A step trains the narrowest and the widest level, and two others (the sandwich rule).
    """

    def __init__(self, teacher: Teacher, levels: Sequence[Widths], rank: int, seed: int) -> None:
        """Make an adapter that changes nothing yet."""
        super().__init__()
        self.whole = Level(teacher, all_units(teacher.blocks), rank, seed)
        self._levels = levels

    def at(self, widths: Widths) -> Level:
        """Return a level with its part of the adapter."""
        return _Part(self.whole, widths)

    def forward(self, windows: Tensor) -> Tensor:
        """Return the outputs of the levels of a step, ``(n_levels, n_windows, n_tokens, n_embd)``.

        The levels depend on the windows only, so that a run can go on.
        """
        inner = self._levels[1:-1]
        chance = np.random.default_rng(int(windows.sum()))
        picks = chance.permutation(len(inner))[:2]
        chosen = [self._levels[0], *(inner[i] for i in picks), self._levels[-1]]
        return torch.stack([self.at(widths)(windows) for widths in chosen])


class _Part(Level):
    """A level that uses part of another level's adapters."""

    def __init__(self, whole: Level, widths: Widths) -> None:
        super().__init__(whole.teacher, widths, 1)
        self.adapters, self._whole = nn.ParameterDict(), [whole]  # a list hides it from torch

    def pair(self, layer: int, name: str) -> tuple[Tensor, Tensor]:
        """Return the first columns of A and the first rows of B."""
        (whole,) = self._whole
        a, b = whole.pair(layer, name)
        n_in, n_out = dimensions_of(self.teacher.blocks, self.widths, layer, name)
        return a[:, :n_in], b[:n_out]


class _Sum:
    """Mean loss over the levels of a step."""

    def __init__(self, objective: Objective) -> None:
        self._objective = objective

    def __call__(self, outputs: Tensor, windows: Windows) -> tuple[float, Tensor]:
        found = [self._objective(each, windows) for each in outputs]
        losses, gradients = zip(*found, strict=True)
        return float(np.mean(losses)), torch.stack(gradients) / len(found)


def learned(  # noqa: PLR0913, PLR0917 -- what learns, from what, how, and where it is kept
    arm: Arm,
    teacher: Teacher,
    widths: Sequence[Widths],
    training: Windows,
    recipe: Recipe,
    kept: Callable[[Recipe], Kept],
    progress: Callable[[int, float], None],
) -> Sequence[Level]:
    """Return the levels as an arm recovers them.

    Args:
        arm: The arm.
        teacher: The whole model.
        widths: Widths of the levels: one, or for a nested adapter all, from wide to narrow.
        training: Windows to learn from.
        recipe: How to learn; the arm's own settings replace some of it.
        kept: Function that returns where to keep a run with a recipe.
        progress: Called with the tokens and the loss of each step.
    """
    n_tokens = max(1, round(arm.share * recipe.n_tokens))
    recipe = replace(recipe, n_tokens=n_tokens, loss=arm.loss, is_fitted=arm.is_fitted)
    module: Any
    if arm.trains == "nested":
        module = Nested(teacher, widths, recipe.rank, recipe.seed)
    elif arm.trains == "gains":
        module = Gains(teacher, widths[0])
    elif arm.trains == "paper's":
        module = AtPapersMatrices(teacher, widths[0], recipe.rank, recipe.seed)
    else:
        module = Level(teacher, widths[0], recipe.rank, recipe.seed)
    place = kept(recipe)
    if arm.is_fitted and not place.path.exists():
        closed_form.fit(module, training)
    if arm.loss:
        objective = Objective(teacher, arm.loss)
        train(
            module,
            _Sum(objective) if arm.trains == "nested" else objective,
            Batches(training, recipe.n_rows, recipe.seed),
            Settings(recipe.n_steps(training.shape[1]), recipe.rate),
            kept=place,
            progress=progress,
        )
    return [module.at(each) for each in widths] if arm.trains == "nested" else [module]

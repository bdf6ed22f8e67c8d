"""Losses against the whole model's predictions, or against the text itself.

Logits are computed for a few positions at a time, so memory does not grow with the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from llmaas_plugins.elastic.torch_model import Decoder

__all__ = [
    "LOSSES",
    "MOST_LOGITS",
    "Objective",
    "Quality",
    "batched",
    "closure",
    "improves",
    "mean_quality",
    "qualities",
]

MOST_LOGITS = 1 << 23
"""Most logits in memory at once, of the student and of the teacher each."""
_N_JUDGED = 8
"""Windows to judge at once: a GPU is as fast as with one, and gradients take more memory."""
_SURE = 2.0
"""Standard errors by which a mean must be above 0."""


def _divergence(student: Tensor, teacher: Tensor, _targets: Tensor) -> Tensor:
    """Return KL(teacher ‖ student), summed over the positions."""
    expected = functional.log_softmax(teacher, -1)
    return functional.kl_div(
        functional.log_softmax(student, -1), expected, reduction="sum", log_target=True
    )


def _next_token(student: Tensor, _teacher: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(student, targets, reduction="sum")


LOSSES: Mapping[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "kl": _divergence,
    "next-token": _next_token,
}
"""Losses by name. ``kl`` compares all predictions with the whole model's, at temperature 1;
``next-token`` is the loss of the paper (ElastiLM §3.2), which does not need the whole model.
"""


class Objective:
    """Loss of a student's outputs, and its gradient."""

    def __init__(self, decoder: Decoder, loss: str = "kl", n_prompt: int = 0) -> None:
        """Compare with the whole model ``decoder`` by a loss of ``LOSSES``.

        Args:
            decoder: The whole model.
            loss: Name of a loss.
            n_prompt: First tokens of each window whose predictions do not count.
        """
        self._decoder, self._loss, self._n_prompt = decoder, LOSSES[loss], n_prompt
        self._has_teacher = loss == "kl"

    def __call__(self, outputs: Tensor, windows: NDArray[np.int32]) -> tuple[float, Tensor]:
        """Return the mean loss of a position, and its gradient with respect to ``outputs``.

        Args:
            outputs: Outputs of the student's last layer for all tokens of the windows except the
                prompt and the last token, ``(n_windows, n_tokens - n_prompt - 1, n_embd)``.
            windows: The windows, ``(n_windows, n_tokens)``.
        """
        decoder, y, n_prompt = self._decoder, outputs.detach().flatten(0, 1), self._n_prompt
        known = y if not self._has_teacher else _whole(decoder, windows, n_prompt)
        targets = _targets(windows, n_prompt, decoder.device)
        total, gradient = 0.0, torch.empty_like(y)
        for rows in _chunks(decoder, len(y)):
            part = y[rows].requires_grad_()
            with torch.no_grad():
                expected = decoder.logits(known[rows]) if self._has_teacher else part
            loss = self._loss(decoder.logits(part), expected, targets[rows])
            (gradient[rows],) = torch.autograd.grad(loss, part)
            total += float(loss.detach())
        return total / len(y), gradient.view_as(outputs).div_(len(y))


class Quality(NamedTuple):
    """Quality of a window's predictions.

    Attributes:
        kl: KL(whole model ‖ this model), in nats a token.
        loss: Loss of the text's own tokens, in nats a token.
        whole: Loss of the whole model, in nats a token.
    """

    kl: float
    loss: float
    whole: float


def batched(windows: NDArray[np.int32]) -> Iterator[NDArray[np.int32]]:
    """Yield the windows to judge, some at a time."""
    for start in range(0, len(windows), _N_JUDGED):
        yield windows[start : start + _N_JUDGED]


def mean_quality(found: Sequence[Quality]) -> Quality:
    """Return the mean over windows."""
    return Quality(*np.mean(found, axis=0).tolist())


def closure(before: Quality, after: Quality) -> float | None:
    """Return the share of the gap to the whole model that is won back; None without a gap."""
    gap = before.loss - before.whole
    return (before.loss - after.loss) / gap if gap > 0 else None


def improves(gains: NDArray[np.float64]) -> bool:
    """Return whether the mean of the windows' gains is above 0 beyond chance."""
    error = gains.std(ddof=1) / math.sqrt(len(gains)) if len(gains) > 1 else 0.0
    return bool(gains.mean() > max(_SURE * error, 0.0))


def qualities(
    decoder: Decoder, outputs: Tensor, windows: NDArray[np.int32], n_prompt: int = 0
) -> list[Quality]:
    """Return the quality of each window, from the outputs of the last layer as in ``Objective``."""
    teacher = _whole(decoder, windows, n_prompt)
    targets = _targets(windows, n_prompt, decoder.device)
    student, n = outputs.detach().flatten(0, 1), windows.shape[1] - n_prompt - 1
    found = torch.empty(len(student), 3, dtype=torch.float64, device=decoder.device)
    for rows in _chunks(decoder, len(student)):
        with torch.no_grad():
            mine = functional.log_softmax(decoder.logits(student[rows]), -1)
            whole = functional.log_softmax(decoder.logits(teacher[rows]), -1)
        found[rows, 0] = (whole.exp() * (whole - mine)).sum(-1).double()
        for column, logs in ((1, mine), (2, whole)):
            found[rows, column] = -logs.gather(-1, targets[rows, None])[:, 0].double()
    return [Quality(*row) for row in found.view(len(windows), n, 3).mean(1).tolist()]


def _whole(decoder: Decoder, windows: NDArray[np.int32], n_prompt: int) -> Tensor:
    """Return the whole model's outputs of the last layer, after the prompt."""
    with torch.no_grad():
        return decoder.run(windows[:, :-1])[:, n_prompt:].flatten(0, 1)


def _targets(windows: NDArray[np.int32], n_prompt: int, device: torch.device) -> Tensor:
    return torch.from_numpy(windows[:, n_prompt + 1 :].astype(np.int64)).flatten().to(device)


def _chunks(decoder: Decoder, n_rows: int) -> Iterator[slice]:
    step = max(1, MOST_LOGITS // decoder.n_vocab)
    for start in range(0, n_rows, step):
        yield slice(start, start + step)

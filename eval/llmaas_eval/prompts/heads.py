"""Decision heads: chances of each setting, and the paper's two softmaxes over share and level."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

__all__ = ["Chances", "Fit", "Softmaxes", "base_logits", "crossfit", "knobs", "normal"]

Values = NDArray[np.float64]

_N_FOLDS, _N_ITERATIONS, _N_HIDDEN = 4, 60, 32


class Head(Protocol):
    """Decision head that learns from some rows and tells something of others.

    Attributes:
        penalties: Weights of the squared weights; one is chosen on documents that are held out.
    """

    penalties: ClassVar[Sequence[float]]

    def learned(self, rows: NDArray[np.intp], penalty: float) -> Callable[..., Values]:
        """Learn from rows; return a function of rows."""

    def loss(self, found: Values, rows: NDArray[np.intp]) -> float:
        """Return the mean loss of what was told of rows."""


class Fit(NamedTuple):
    """Values that a head tells.

    Attributes:
        inner: Values of the rows that it learns from, by heads that saw other documents only.
        outer: Values of all rows.
    """

    inner: Values
    outer: Values


def crossfit(head: Head, rows: NDArray[np.intp], documents: NDArray[np.str_]) -> Fit:
    """Learn from rows, with the penalty that is best on documents held out.

    Args:
        head: The head.
        rows: Rows to learn from.
        documents: Document of every row.
    """
    everything = np.arange(len(documents))
    best: tuple[float, float, Values] | None = None
    for penalty in head.penalties:
        found, loss = None, 0.0
        for learn, held_out in _folds(rows, documents):
            told = head.learned(learn, penalty)(held_out)
            found = np.zeros((len(documents), *told.shape[1:])) if found is None else found
            found[held_out] = told
            loss += head.loss(told, held_out) * len(held_out) / len(rows)
        assert found is not None
        if best is None or loss < best[0]:
            best = loss, penalty, found[rows]
    assert best is not None
    return Fit(best[2], head.learned(rows, best[1])(everything))


def normal(groups: Sequence[Values], rows: NDArray[np.intp]) -> Tensor:
    """Return features with the mean 0 over rows; each group has about the length 1.

    So few plain features count as much as a tiny model's many.
    """
    found = []
    for features in groups:
        some = features[rows]
        scaled = (features - some.mean(axis=0)) / np.maximum(some.std(axis=0), 1e-6)
        found.append(scaled / np.sqrt(features.shape[1]))
    return torch.tensor(np.concatenate(found, axis=1), dtype=torch.float32)


def knobs(shape: Sequence[int]) -> Values:
    """Return which value of each knob a setting has, and a column that all have."""
    places = np.indices(tuple(shape)).reshape(len(shape), -1)
    columns = [places[i] == value for i, n in enumerate(shape) for value in range(n)]
    return np.stack([*columns, np.ones(places.shape[1])], axis=1).astype(np.float64)


def base_logits(is_right: Tensor) -> Tensor:
    """Return the log-odds of each setting over prompts, finite also for one that is never right."""
    return torch.logit((is_right.sum(0) + 0.5) / (len(is_right) + 1))


class Chances:
    """Probability that each setting is right: its mean, and a direction for each knob's value."""

    penalties: ClassVar[Sequence[float]] = (1e-2, 1e-3, 3e-4, 1e-4, 3e-5, 1e-5)

    def __init__(
        self, features: Sequence[Values], is_right: NDArray[np.bool_], shape: Sequence[int]
    ) -> None:
        """Take groups of features, ``(n, d)`` each, and outcomes ``(n, n_settings)``."""
        self._features, self._right = features, is_right.astype(np.float64)
        self._knobs = torch.tensor(knobs(shape), dtype=torch.float32)

    def learned(self, rows: NDArray[np.intp], penalty: float) -> Callable[..., Values]:
        """Learn from rows; return a function that tells the probabilities of others."""
        x = normal(self._features, rows)
        y = torch.tensor(self._right[rows], dtype=torch.float32)
        base = base_logits(y)
        weights = torch.zeros(x.shape[1], self._knobs.shape[1], requires_grad=True)

        def logits(some: NDArray[np.intp]) -> Tensor:
            return base + x[some] @ weights @ self._knobs.T

        def loss() -> Tensor:
            found = functional.binary_cross_entropy_with_logits(logits(rows), y)
            return y.shape[1] * (found + penalty * weights.square().sum())

        _minimize([weights], loss)
        return lambda some: logits(some).sigmoid().detach().numpy().astype(np.float64)

    def loss(self, found: Values, rows: NDArray[np.intp]) -> float:
        """Return the mean cross-entropy."""
        y, p = self._right[rows], found.clip(1e-6, 1 - 1e-6)
        return float(-(y * np.log(p) + (1 - y) * np.log(1 - p)).mean())


class Softmaxes:
    """The paper's head: a share and a level from features and the promise.

    Rows are repeated for each promise.
    """

    penalties: ClassVar[Sequence[float]] = (1e-2, 3e-3, 1e-3, 3e-4)

    def __init__(
        self,
        features: Sequence[Values],
        promises: Values,
        labels: NDArray[np.intp],
        shape: tuple[int, int],
    ) -> None:
        """Take features and labels.

        Args:
            features: Groups of features of each prompt, ``(n, d)`` each.
            promises: Features of each promise, ``(n_promises, k)``: one-hot, as in the paper.
            labels: Share and level, ``(n, n_promises, 2)``.
            shape: Numbers of shares and of levels.
        """
        self._features, self._promises = features, promises
        self._labels, self._shape = labels, shape

    def learned(self, rows: NDArray[np.intp], penalty: float) -> Callable[..., Values]:
        """Learn from rows; return a function that tells ``(n, n_promises, n_shares, n_levels)``."""
        x = normal(self._features, rows)
        promises = torch.tensor(self._promises, dtype=torch.float32)
        labels = torch.tensor(self._labels[rows])
        chance = torch.Generator().manual_seed(0)
        sizes = (
            (x.shape[1], _N_HIDDEN),
            (promises.shape[1], _N_HIDDEN),
            (_N_HIDDEN, sum(self._shape)),
        )
        weights = [
            (torch.randn(size, generator=chance) / size[0] ** 0.5).requires_grad_()
            for size in sizes
        ]
        bias = torch.zeros(sum(self._shape), requires_grad=True)

        def logits(some: NDArray[np.intp]) -> tuple[Tensor, Tensor]:
            hidden = torch.tanh((x[some] @ weights[0])[:, None] + promises @ weights[1])
            share, level = (hidden @ weights[2] + bias).split(self._shape, dim=-1)
            return share.log_softmax(-1), level.log_softmax(-1)

        def loss() -> Tensor:
            found = sum(
                functional.nll_loss(part.flatten(0, 1), labels[..., i].flatten())
                for i, part in enumerate(logits(rows))
            )
            squares = sum(one.square().sum() for one in weights)
            return torch.as_tensor(found + penalty * squares)

        _minimize([*weights, bias], loss)

        def joint(some: NDArray[np.intp]) -> Values:
            share, level = logits(some)
            found = (share[..., :, None] + level[..., None, :]).exp()
            return found.detach().numpy().astype(np.float64)

        return joint

    def loss(self, found: Values, rows: NDArray[np.intp]) -> float:
        """Return the mean surprise of the labels."""
        n, labels = found.shape[1], self._labels[rows]
        p = found[np.arange(len(rows))[:, None], np.arange(n), labels[..., 0], labels[..., 1]]
        return float(-np.log(p.clip(1e-9)).mean())


# -- inside --------------------------------------------------------------------------------------


def _folds(
    rows: NDArray[np.intp], documents: NDArray[np.str_]
) -> Iterator[tuple[NDArray[np.intp], NDArray[np.intp]]]:
    """Yield rows to learn from and rows to judge by, whose documents differ."""
    names, number = np.unique(documents[rows], return_inverse=True)
    fold = (np.random.default_rng(0).permutation(len(names)) % _N_FOLDS)[number]
    for i in range(_N_FOLDS):
        if (fold == i).any() and (fold != i).any():
            yield rows[fold != i], rows[fold == i]


def _minimize(parameters: list[Tensor], loss: Callable[[], Tensor]) -> None:
    optimizer = torch.optim.LBFGS(
        parameters, max_iter=_N_ITERATIONS, tolerance_change=1e-7, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        found = loss()
        found.backward()
        return found

    optimizer.step(closure)

"""Locality of active channels: similarity between layers, and repetition between tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from llmaas_eval.sparse.policies import Flags, Trace
from llmaas_eval.sparse.scales import coverage
from llmaas_eval.sparse.texts import Tokens
from llmaas_plugins.flash_weights.operands import FAMILIES

__all__ = ["Likeness", "Reader", "Selection", "Spread", "likeness", "selection", "spread", "traces"]

_DISTANCES = range(1, 5)
_N_DECILES = 10

Floats = NDArray[np.floating]


class Reader(Protocol):
    """Part of ``Oracle`` that this module uses."""

    n_layer: int

    def read(self, tokens: NDArray[np.int64]) -> Mapping[tuple[int, str], NDArray[np.float32]]:
        """Return the operands of a row of tokens."""

    def threshold(self, key: tuple[int, str], sparsity: float) -> float:
        """Return the quantile ``sparsity`` of an operand's magnitudes."""

    def busy(self, key: tuple[int, str], sparsity: float) -> NDArray[np.float64]:
        """Return how often each channel was active on the calibration text."""


class Likeness(NamedTuple):
    """Similarity of a family's operands at a distance of layers (Fig 4).

    Attributes:
        family: Name of the family.
        distance: Distance of the two layers.
        cosine: Mean cosine of the two operands, by the first layer.
        precision: Share of a layer's Top-K that are in the other layer's Top-K, by the first layer.
    """

    family: str
    distance: int
    cosine: list[float]
    precision: list[float]


class Selection(NamedTuple):
    """Probability that the hottest channels are selected (Fig 6).

    Attributes:
        seen: Probability of a context's hottest channels on the same context, as in the paper.
        by_context: Probability of the first half's hottest channels on the second half.
        by_task: Probability of the other contexts' hottest channels on the second half.
    """

    seen: float
    by_context: float
    by_task: float


class Spread(NamedTuple):
    """How unevenly the channels of a family are used; means over layers.

    Attributes:
        deciles: Deciles of the channels' probabilities to be active.
        entropy: Entropy of the channels' shares of all activity; 1 for equal shares.
        coverage: Share of all activity in the busiest 30 % of the channels, by layer.
        overlap: Share of a token's active channels that were active for the token before.
        by_chance: Expected ``overlap`` of independent tokens.
        alike: Correlation of the probabilities of consecutive layers, by the first layer.
    """

    deciles: list[float]
    entropy: float
    coverage: list[float]
    overlap: float
    by_chance: float
    alike: list[float]


def traces(
    reader: Reader, contexts: Tokens, sparsity: float, n_prompt: int
) -> Iterator[tuple[str, Trace]]:
    """Yield each family with a trace of the channels above their operand's threshold."""
    rows = [
        {key: np.abs(x) >= reader.threshold(key, sparsity) for key, x in reader.read(row).items()}
        for row in tqdm(contexts, desc="active channels", unit="context", disable=None)
    ]
    layers = range(reader.n_layer)
    for family in FAMILIES:
        active = [np.stack([row[i, family] for i in layers], axis=1) for row in rows]
        busy = np.stack([reader.busy((i, family), sparsity) for i in layers])
        yield family, Trace(np.stack(active), n_prompt, busy)


def likeness(reader: Reader, contexts: Tokens, n_prompt: int, sparsity: float) -> list[Likeness]:
    """Return the similarity of all families at every distance, with Top-K at ``sparsity``."""
    found: dict[tuple[str, int], list[tuple[Floats, Floats]]] = {}
    for row in tqdm(contexts, desc="likeness", unit="context", disable=None):
        operands = reader.read(row)
        for family in FAMILIES:
            x = np.stack([operands[i, family][n_prompt:] for i in range(reader.n_layer)])
            for distance in _DISTANCES:
                pair = _cosines(x, distance), _precisions(x, distance, sparsity)
                found.setdefault((family, distance), []).append(pair)
    return [Likeness(*key, *np.mean(pairs, axis=0).tolist()) for key, pairs in found.items()]


def _cosines(x: Floats, distance: int) -> Floats:
    unit = x / np.linalg.norm(x, axis=-1, keepdims=True)
    return (unit[:-distance] * unit[distance:]).sum(axis=-1).mean(axis=1)


def _precisions(x: Floats, distance: int, sparsity: float) -> Floats:
    n_kept = x.shape[-1] - round(sparsity * x.shape[-1])
    kept = np.zeros(x.shape, np.bool_)
    best = np.argpartition(np.abs(x), -n_kept, axis=-1)[..., -n_kept:]
    np.put_along_axis(kept, best, True, axis=-1)
    return (kept[:-distance] & kept[distance:]).sum(axis=-1).mean(axis=1) / n_kept


def selection(trace: Trace, share: float) -> Selection:
    """Return how likely the hottest ``share`` of the channels are selected."""
    decoded = trace.active[:, trace.n_prompt :]
    half, n = decoded.shape[1] // 2, round(share * decoded.shape[-1])
    whole, first, second = (
        _means(part) for part in (decoded, decoded[:, :half], decoded[:, half:])
    )
    others = (whole.sum(axis=0) - whole) / max(1, len(whole) - 1)
    return Selection(
        _of_hottest(whole, whole, n), _of_hottest(first, second, n), _of_hottest(others, second, n)
    )


def _means(active: Flags) -> NDArray[np.float64]:
    """Return the channels' probabilities to be active, by context."""
    return active.mean(axis=1)


def _of_hottest(by: Floats, probabilities: Floats, n: int) -> float:
    hottest = np.argsort(-by, axis=-1)[..., :n]
    return float(np.take_along_axis(probabilities, hottest, axis=-1).mean())


def spread(trace: Trace) -> Spread:
    """Return how unevenly channels are used by the decoded tokens."""
    decoded = trace.active[:, trace.n_prompt :]
    p = decoded.mean(axis=(0, 1))
    shares = np.maximum(p / p.sum(axis=1, keepdims=True), 1e-12)
    entropies = -(shares * np.log2(shares)).sum(axis=1) / np.log2(p.shape[1])
    again = (decoded[:, 1:] & decoded[:, :-1]).sum() / decoded[:, 1:].sum()
    return Spread(
        np.quantile(p, np.linspace(0, 1, _N_DECILES + 1), axis=1).mean(axis=1).tolist(),
        float(entropies.mean()),
        [coverage(row) for row in p],
        float(again),
        float(((p**2).sum(axis=1) / p.sum(axis=1)).mean()),
        [float(np.corrcoef(a, b)[0, 1]) for a, b in pairwise(p)],
    )

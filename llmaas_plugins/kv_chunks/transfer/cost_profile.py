"""Measured costs of recomputing, reading and loading on this machine with this model (LLMS §3.3).

The paper measures once, at installation. Here every evaluated prompt and every load is a data
point. Recent points count most, so that the fit follows a disk or a processor that gets slower. No
extra measurements are made, and lines are fitted during swap-out, when no request waits. Until
enough bytes were read to estimate the disk's speed, everything is loaded. Points are kept in the
store, so that another process starts with them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmaas_plugins.files.json_text import parse_json
from llmaas_plugins.kv_chunks.store.chunk_ids import CHUNK_TOKENS
from llmaas_plugins.kv_chunks.store.reuse import MissCosts
from llmaas_plugins.kv_chunks.transfer.planning import LoadCosts

__all__ = ["CostProfile", "LinearFit", "non_negative_least_squares"]

_MAX_POINTS = 64
_MIN_READ_BYTES = 4 << 20
_PAIRS = 4096
_READ_BYTE_S = 1e-9
_TOKENS = _BYTES = 1
"""Indices of the tokens of an evaluation, and of the bytes of a read, among the amounts."""
_OUTLIER_FACTOR = 2.0
_MIN_SECONDS, _MAX_SECONDS, _MAX_AMOUNT = 1e-7, 1e5, 1e15


class LinearFit:
    """A fit of seconds as a linear function of amounts, with non-negative coefficients."""

    def __init__(self, n_amounts: int, decay: float) -> None:
        """Start without points.

        Args:
            n_amounts: Number of amounts that the seconds depend on.
            decay: Weight of a point relative to the next newer one.
        """
        self._n_amounts = n_amounts
        self._decay = decay
        self._points = np.empty((0, 1 + n_amounts))  # seconds and amounts, oldest first
        self._texts: deque[str] = deque(maxlen=_MAX_POINTS)  # the same points as JSON
        self._fit: NDArray[np.float64] | None = None
        self._share = 1.0

    def add(self, seconds: float, *amounts: float) -> None:
        """Record that ``amounts`` took ``seconds``.

        Two points in a row that are far off the line on the same side start a new line.
        """
        expected = self.coefficients()
        share = 1.0 if expected is None else seconds / max(float(expected @ amounts), 1e-9)
        self._append((max(seconds, _MIN_SECONDS), *amounts))
        if (
            min(share, self._share) > _OUTLIER_FACTOR
            or max(share, self._share) < 1 / _OUTLIER_FACTOR
        ):
            self._points = self._points[-2:]
            self._texts = deque(list(self._texts)[-2:], maxlen=_MAX_POINTS)
            share = 1.0
        self._share = share

    def coefficients(self) -> NDArray[np.float64] | None:
        """Return the seconds per unit of each amount, shape ``(n_amounts,)``; None without points.

        The fit minimizes squared relative errors. Amounts that would get a negative coefficient
        get 0.
        """
        if self._fit is None and len(self._points):
            seconds, amounts = self._points[:, 0], self._points[:, 1:]
            weights = _roots_of_powers(self._decay)[-len(seconds) :]
            self._fit = non_negative_least_squares(amounts * (weights / seconds)[:, None], weights)
        return self._fit

    def sum_of_last(self) -> float:
        """Return the sum of the last amount over all points."""
        return float(self._points[:, -1].sum())

    def unit_seconds(self, i: int) -> float:
        """Return all seconds for each unit of amount ``i``, where there was most of it.

        Its coefficient says less: what comes with it, such as pairs with tokens, takes time, too.

        Returns:
            The seconds; 0 without points.
        """
        coefficients = self.coefficients()
        if coefficients is None:
            return 0.0
        amounts = self._points[np.argmax(self._points[:, 1 + i]), 1:]
        return float(coefficients @ amounts) / max(float(amounts[i]), 1.0)

    def to_json(self) -> str:
        """Return the points as a JSON array, oldest first, for ``restore``."""
        return f"[{', '.join(self._texts)}]"

    def restore(self, points: Iterable[Any]) -> None:
        """Add points that another process measured; invalid points are ignored."""
        for point in points:
            if self._is_valid(point):
                self._append(tuple(map(float, point)))

    def _append(self, point: tuple[float, ...]) -> None:
        self._points = np.vstack([self._points[-_MAX_POINTS + 1 :], point])
        self._texts.append(f"[{', '.join([f'{value:.5g}' for value in point])}]")
        self._fit = None

    def _is_valid(self, point: Any) -> bool:
        return (
            isinstance(point, list)
            and len(point) == 1 + self._n_amounts
            and all(type(value) in {int, float} for value in point)
            and _MIN_SECONDS <= point[0] <= _MAX_SECONDS
            and all(0 <= amount <= _MAX_AMOUNT for amount in point[1:])
        )


class CostProfile:
    """Data points of one model on this machine; use it from one thread at a time."""

    def __init__(self, stored: str | None) -> None:
        """Start with the output of ``to_json``; invalid input is ignored."""
        self._recompute = LinearFit(3, decay=0.9)
        self._read = LinearFit(2, decay=0.8)
        self._load = LinearFit(2, decay=0.8)
        self._unlearned: deque[tuple[LinearFit, float, tuple[float, ...]]] = deque(
            maxlen=_MAX_POINTS
        )
        self._n_points = 0
        self.n_stored = 0
        try:
            found = parse_json(stored or "{}")
            for name, line in self._lines().items():
                line.restore(found.get(name, ()))
        except (ValueError, AttributeError, TypeError):
            pass  # hostile or incomplete text: start without points

    @property
    def has_unsaved_points(self) -> bool:
        """Whether there are points that ``to_json`` has not returned yet."""
        return self._n_points > self.n_stored

    def evaluated(self, n_tokens: int, start: int, seconds: float) -> None:
        """Record the time of a ``llama_decode`` of tokens from position ``start`` on."""
        n_pairs = n_tokens * (max(start, 0) + n_tokens / 2)
        self._note(self._recompute, seconds, n_tokens, n_pairs / _PAIRS)

    def read(self, n_bytes: int, seconds: float) -> None:
        """Record the time to read bytes from disk."""
        self._note(self._read, seconds, n_bytes)

    def loaded(self, n_tokens: int, seconds: float) -> None:
        """Record the time to load tokens' cells from RAM into the engine."""
        self._note(self._load, seconds, n_tokens)

    def learn(self) -> None:
        """Fit the lines to the new points, which takes longer than to record them."""
        while self._unlearned:
            line, seconds, amounts = self._unlearned.popleft()
            line.add(seconds, *amounts)
        for line in self._lines().values():
            line.coefficients()

    def costs(self) -> LoadCosts | None:
        """Return the costs for planning, or None while too little is known."""
        self.learn()
        recompute, read = self._recompute.coefficients(), self._read.coefficients()
        if recompute is None or read is None or self._read.sum_of_last() < _MIN_READ_BYTES:
            return None
        call, token, pairs = recompute
        return LoadCosts(call, token, pairs / _PAIRS, read[0], read[1], *self._load_costs())

    def miss_costs(self) -> MissCosts:
        """Return the time that a chunk takes if it is not in RAM.

        Reading is guessed until it is measured. Evaluation takes 0 s until then.
        """
        byte_s = self._read.unit_seconds(_BYTES) or _READ_BYTE_S
        return MissCosts(byte_s, CHUNK_TOKENS * self._recompute.unit_seconds(_TOKENS))

    def load_seconds(self, n_tokens: int) -> float | None:
        """Predict the seconds to load tokens from RAM alone; None while nothing is known."""
        if self._load.coefficients() is None:
            return None
        start, each = self._load_costs()
        return start + each * n_tokens

    def to_json(self) -> str:
        """Return all points as JSON, for another process."""
        self.learn()
        self.n_stored = self._n_points
        lines = [f'"{name}": {line.to_json()}' for name, line in self._lines().items()]
        return f"{{{', '.join(lines)}}}"

    def _note(self, line: LinearFit, seconds: float, *amounts: float) -> None:
        self._unlearned.append((line, seconds, (1, *amounts)))
        self._n_points += 1

    def _load_costs(self) -> tuple[float, float]:
        load = self._load.coefficients()
        return (0.0, 0.0) if load is None else (float(load[0]), float(load[1]))

    def _lines(self) -> dict[str, LinearFit]:
        return {"recompute": self._recompute, "read": self._read, "load": self._load}


@cache
def _roots_of_powers(decay: float) -> NDArray[np.float64]:
    """Return the square roots of the weights of the points, oldest first."""
    return np.sqrt(decay ** np.arange(_MAX_POINTS)[::-1])


def non_negative_least_squares(
    amounts: NDArray[np.float64], seconds: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Solve least squares without negative values; return the minimum-norm solution of several."""
    kept = np.arange(amounts.shape[1])
    found = np.zeros(len(kept))
    while len(kept):
        values = np.linalg.lstsq(amounts[:, kept], seconds, rcond=None)[0]
        if values.min() >= 0:
            found[kept] = values
            break
        kept = np.delete(kept, values.argmin())
    return found

"""Measure the effect of widths on a loaded model: change of its predictions, and time per unit."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from llmaas_hooks import LlmaasError, NativeContext, Tokens, WeightClaim, hookimpl
from llmaas_plugins.elastic.parts import extents_of, part_claims
from llmaas_plugins.elastic.searching import UnitTimes
from llmaas_plugins.elastic.units import Blocks, Widths, all_units
from llmaas_plugins.model.forward import Evaluator, log_softmax

__all__ = ["Divergence", "Prober", "unit_times"]

_MOST_REFERENCE_BYTES = 256 << 20
_ROUNDS = 9
_PROMPT = 128


class Prober:
    """Plugin that changes the widths of a model loaded while it is active.

    Use it as ``activate(…, {"prober": Prober(blocks)})``.

    Attributes:
        full: Widths of the whole model.
    """

    def __init__(
        self,
        blocks: Blocks,
        levels: Sequence[Widths] = (),
        biases: Mapping[str, NDArray[np.float32]] = MappingProxyType({}),
    ) -> None:
        """Start with all units, or with the first of ``levels``.

        Args:
            blocks: Blocks of the model.
            levels: Widths for ``set_level``.
            biases: Biases of the levels, by weight; ``(n_levels, n_embd)``.
        """
        self._blocks, self._biases = blocks, biases
        self._context: NativeContext | None = None
        self.full = all_units(blocks)
        self._levels = levels or [self.full]

    @hookimpl
    def llmaas_weights(self) -> list[WeightClaim]:
        """Claim the weights that levels narrow."""
        return part_claims(self._blocks, self._levels, self._biases)

    @hookimpl
    def llmaas_native_context(self, context: NativeContext) -> None:
        """Keep the context to change its widths."""
        self._context = context

    @hookimpl
    def llmaas_context_free(self) -> None:
        """Forget the context."""
        self._context = None

    def set(self, widths: Widths) -> None:
        """Change the widths from the next batch on.

        Raises:
            LlmaasError: The engine has no hook point.
        """
        context = self._opened()
        for weight, extents in extents_of(self._blocks, [widths]).items():
            context.set_part(weight, extents)

    def set_level(self, level: int) -> None:
        """Use one of the levels from the next batch on; a negative level means all units.

        Raises:
            LlmaasError: The engine has no hook point.
        """
        self._opened().level = level

    def _opened(self) -> NativeContext:
        if self._context is None:
            raise LlmaasError(
                "widths cannot be changed: the engine has no hook point. `llmaas doctor` says why."
            )
        return self._context


class Divergence:
    """Mean KL divergence of a text's next-token distributions from the initial ones."""

    def __init__(self, evaluator: Evaluator, text: Tokens, n_tokens: int) -> None:
        """Record the initial distributions of at most ``n_tokens`` tokens of the text.

        If the last window does not fit within ``n_tokens``, only its first tokens count.
        """
        self._evaluator, self._text = evaluator, text
        self._n_tokens = min(n_tokens, _MOST_REFERENCE_BYTES // (4 * evaluator.n_vocab))
        self._expected = list(self._predictions())

    def measure(self) -> float:
        """Return the current divergence in nats per token."""
        pairs = zip(self._expected, self._predictions(), strict=True)
        sums = [float((np.exp(p) * (p - q)).sum()) for p, q in pairs]
        return sum(sums) / sum(map(len, self._expected))

    def _predictions(self) -> Iterator[NDArray[np.float32]]:
        """Yield log probabilities."""
        n_left = self._n_tokens
        for _tokens, logits in self._evaluator.predict(self._text, self._n_tokens):
            yield log_softmax(logits[:n_left])
            n_left -= len(logits)
            if n_left <= 0:
                return


def unit_times(prober: Prober, evaluator: Evaluator, blocks: Blocks, text: Tokens) -> UnitTimes:
    """Measure the time of units, as a share of the whole model's, averaged over prompt and token.

    Widths alternate, so that other load on the machine affects all of them, and the shortest times
    count. A busy machine may measure anything, so each unit counts at least half the time that its
    share of bytes suggests.
    """
    full = prober.full
    groups = np.full_like(full.groups, blocks.group_granule)
    neurons = np.full_like(full.neurons, -(-blocks.n_ff // 4 // blocks.granule) * blocks.granule)
    tried = full, Widths(groups, full.neurons), Widths(full.groups, neurons)
    of_full, of_groups, of_neurons = np.min(
        [[_times(prober, evaluator, widths, text) for widths in tried] for _ in range(_ROUNDS)],
        axis=0,
    )
    n_groups, n_neurons = (full.groups - groups).sum(), (full.neurons - neurons).sum()
    measured = UnitTimes(
        float(np.mean(1 - of_groups / of_full)) / max(1, int(n_groups)),
        float(np.mean(1 - of_neurons / of_full)) / max(1, int(n_neurons)),
    )
    return UnitTimes(
        max(measured.group, float(np.mean(blocks.group_bytes)) / blocks.n_bytes / 2),
        max(measured.neuron, float(np.mean(blocks.neuron_bytes)) / blocks.n_bytes / 2),
    )


def _times(
    prober: Prober, evaluator: Evaluator, widths: Widths, text: Tokens
) -> tuple[float, float]:
    """Return the seconds of a prompt, and of a token."""
    prober.set(widths)
    started = time.perf_counter()
    list(evaluator.evaluate(text[:_PROMPT], _PROMPT))
    between = time.perf_counter()
    list(evaluator.generate(1))
    return between - started, time.perf_counter() - between

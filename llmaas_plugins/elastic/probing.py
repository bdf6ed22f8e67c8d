"""Measure the effect of widths on a loaded model's predictions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from llmaas_hooks import LlmaasError, NativeContext, Tokens, WeightClaim, hookimpl
from llmaas_plugins.elastic.parts import extents_of, part_claims
from llmaas_plugins.elastic.units import Blocks, Widths, all_units
from llmaas_plugins.model.forward import Evaluator, log_softmax

__all__ = ["Prober", "TextLoss"]

NEXT_TOKEN_SHARE = 0.5
_MOST_REFERENCE_BYTES = 128 << 20


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


class TextLoss:
    """Loss of a loaded model on windows of text, at any widths.

    It is the KL divergence of next-token distributions from the initial ones, plus a share of the
    loss of the text's own next tokens. A model that predicts a text badly may be better there with
    fewer units; the divergence alone would keep them.
    """

    def __init__(
        self, evaluator: Evaluator, windows: Sequence[Tokens], share: float = NEXT_TOKEN_SHARE
    ) -> None:
        """Record the initial distributions, at most 128 MiB of them: later windows do not count.

        Args:
            evaluator: Evaluator of the model.
            windows: Windows of text, as ``Evaluator.cut`` returns them.
            share: Factor of the loss of next tokens.
        """
        self._evaluator, self._share = evaluator, share
        n_most = max(_MOST_REFERENCE_BYTES // (2 * evaluator.n_vocab), 1)
        sizes = np.cumsum([len(window) for window in windows])
        self.windows = tuple(windows[: max(int(np.searchsorted(sizes, n_most, "right")), 1)])
        self._expected: list[NDArray[np.float16]] = []
        self._expected_nats: list[float] = []
        for window in self.windows:
            expected, nats, at = np.empty((len(window), evaluator.n_vocab), np.float16), 0.0, 0
            for tokens, rows in evaluator.read(window):
                log_p = log_softmax(rows)
                p = np.exp(log_p)
                expected[at : at + len(tokens)] = p
                nats += float(np.vdot(p, log_p))
                at += len(tokens)
            self._expected.append(expected)
            self._expected_nats.append(nats)

    def measure(self) -> float:
        """Return the current loss in nats per token, averaged over windows."""
        return float(self.by_window().mean())

    def by_window(self) -> NDArray[np.float64]:
        """Return each window's current loss in nats per token; ``(n_windows,)``."""
        return np.array([self._loss(i) for i in range(len(self.windows))])

    def _loss(self, i: int) -> float:
        window, at = self.windows[i], 0
        divergence, nats = self._expected_nats[i], 0.0
        for _, logits in self._evaluator.read(window):
            expected = self._expected[i][at : at + len(logits)]
            largest = logits.max(axis=1)
            normalizers = largest + np.log(np.exp(logits - largest[:, None]).sum(axis=1))
            divergence += float(normalizers.sum()) - float(np.vdot(expected, logits))
            targets = window[at + 1 : at + 1 + len(logits)].astype(np.intp)
            rows = np.arange(len(targets))
            nats += float((normalizers[rows] - logits[rows, targets]).sum())
            at += len(logits)
        return divergence / len(window) + self._share * nats / max(len(window) - 1, 1)

"""How large a model's activations are: the threshold that leaves out a given share of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmaas_hooks import ConfigError, LlmaasError, Tokens
from llmaas_hooks.native import Activation, Magnitudes
from llmaas_plugins.evaluating import Evaluator, Listener
from llmaas_plugins.flash_weights.operands import Operand

__all__ = ["SPARSITIES", "Activity", "Calibration", "Calibrator", "channel_order"]

SPARSITIES = tuple(n / 20 for n in range(1, 20))
"""Shares of an activation's values that are left out."""

_ACTIVATIONS: dict[str, Activation] = {
    "attn_qkv": "attn_input",
    "attn_output": "attn_result",
    "ffn_up": "ffn_input",
    "ffn_down": "ffn_middle",
}
"""What the families read."""
_N_TOKENS = 2048
_BUCKET_SHIFT = 17


@dataclass(frozen=True, slots=True, eq=False)
class Activity:
    """How large the values of an operand are.

    Attributes:
        quantiles: For each of ``SPARSITIES``, the magnitude that this share of values is below;
            float32.
        means: Mean magnitude by channel; float32, ``(n_channels,)``.
    """

    quantiles: NDArray[np.float32]
    means: NDArray[np.float32]


Calibration = dict[Operand, Activity]
"""What a model's operands are like."""


def channel_order(activities: Sequence[Activity]) -> NDArray[np.int32]:
    """Channels of operands that share an order, busiest first: each operand has the same say."""
    shares = sum(activity.means / max(activity.means.sum(), 1e-30) for activity in activities)
    return np.argsort(-np.asarray(shares), kind="stable").astype(np.int32)


class Calibrator(Listener):
    """Calibrates models that are loaded while it listens: ``activate(…, {"calibrator": self})``."""

    def calibrate(  # noqa: PLR0913 -- what, with what, and how
        self,
        model: Any,
        operands: Sequence[Operand],
        text: Tokens | None = None,
        *,
        n_tokens: int = _N_TOKENS,
        n_threads: int = 0,
        progress: Callable[[int], None] = lambda _n: None,
    ) -> Calibration:
        """Evaluate tokens, and see how large what each operand reads is.

        Args:
            model: A ``llama_model``.
            operands: Those of its file.
            text: What to evaluate, windows of 512 tokens from all over it; what the model itself
                says when None.
            n_tokens: How many, at most.
            n_threads: 0 takes all processors.
            progress: Told of tokens that are done.

        Raises:
            ConfigError: The text is empty, or the model has no operands.
            LlmaasError: There is no memory for a context, or its activations cannot be seen.
        """
        if not operands:
            raise ConfigError("the model has no matrices whose channels could be left out")
        if text is not None and len(text) == 0:
            raise ConfigError("there is nothing in the text to calibrate with")
        with Evaluator(model, n_threads) as evaluator:
            counted = self._count(evaluator, operands)
            tokens = (
                evaluator.generate(n_tokens) if text is None else evaluator.evaluate(text, n_tokens)
            )
            for n_done in tokens:
                progress(n_done)
            return {one: _activity(one, counted[one.family]) for one in operands}

    def _count(self, evaluator: Evaluator, operands: Sequence[Operand]) -> dict[str, Magnitudes]:
        """What counts, by family."""
        context = self.hook_point(evaluator)
        widths: dict[str, dict[int, int]] = {}
        for operand in operands:
            widths.setdefault(operand.family, {})[operand.layer] = operand.n_channels
        return {
            family: context.magnitudes(_ACTIVATIONS[family], n_channels)
            for family, n_channels in widths.items()
        }


def _activity(operand: Operand, magnitudes: Magnitudes) -> Activity:
    counts, sums = magnitudes.read(operand.layer)
    n_rows = int(counts.sum()) / operand.n_channels
    if n_rows == 0 or not np.isfinite(sums).all():
        problem = "are not finite" if n_rows else "do not pass the hook point in the engine"
        raise LlmaasError(
            f"the model cannot be calibrated: what {operand.weights[0]} reads, or some of it, "
            f"{problem}. Is the file damaged, or a layer on a GPU?"
        )
    return Activity(_quantiles(counts), (sums / n_rows).astype(np.float32))


def _quantiles(counts: NDArray[np.uint64]) -> NDArray[np.float32]:
    """Values are taken to be spread evenly over their bucket."""
    edges = (np.arange(len(counts) + 1, dtype=np.uint32) << _BUCKET_SHIFT).view(np.float32)
    below = np.concatenate([[0.0], counts.cumsum(dtype=np.float64)])
    return np.interp(np.array(SPARSITIES) * below[-1], below, edges).astype(np.float32)

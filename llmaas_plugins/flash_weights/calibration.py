"""Measure a model's activations, to find the threshold that leaves out a given share of values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmaas_hooks import ConfigError, LlmaasError, Tokens
from llmaas_hooks.native import Activation, Magnitudes, Overlap
from llmaas_plugins.flash_weights.channel_layout import predictors_of
from llmaas_plugins.flash_weights.operands import Operand
from llmaas_plugins.flash_weights.shares import Share, Shares, equal_share
from llmaas_plugins.model.forward import Evaluator, Listener

__all__ = ["Activity", "Calibration", "Calibrator", "channel_order"]

_ACTIVATIONS: dict[str, Activation] = {
    "attn_qkv": "attn_input",
    "attn_output": "attn_result",
    "ffn_up": "ffn_input",
    "ffn_down": "ffn_middle",
}
"""Activation that each family of matrices reads."""
_N_TOKENS, _N_FORESEEN = 2048, 512
_BUCKET_SHIFT = 17


@dataclass(frozen=True, slots=True, eq=False)
class Activity:
    """Magnitudes of the values of an operand.

    Attributes:
        thresholds: Magnitude below which values are left out at each of ``SPARSITIES``; float32.
        means: Mean magnitude by channel; float32, ``(n_channels,)``.
        share: Share of the values below each threshold.
        foreseen: Share of the values above each threshold whose channels are also above one in the
            layer that predicts them (``predictors_of``); None if it was not measured.
    """

    thresholds: NDArray[np.float32]
    means: NDArray[np.float32]
    share: Share = field(default_factory=equal_share)
    foreseen: Share | None = None


Calibration = dict[Operand, Activity]
"""Magnitudes by operand of a model."""


def channel_order(activities: Sequence[Activity]) -> NDArray[np.int32]:
    """Order the channels of operands that share an order, busiest first.

    Each operand has the same weight.
    """
    shares = sum(activity.means / max(activity.means.sum(), 1e-30) for activity in activities)
    return np.argsort(-np.asarray(shares), kind="stable").astype(np.int32)


class Calibrator(Listener):
    """Plugin that calibrates models loaded while it is active.

    Use it as ``activate(…, {"calibrator": calibrator})``.
    """

    def calibrate(  # noqa: PLR0913 -- model, text, and their limits
        self,
        model: Any,
        operands: Sequence[Operand],
        text: Tokens | None = None,
        *,
        shares: Shares | None = None,
        n_tokens: int = _N_TOKENS,
        n_threads: int = 0,
        progress: Callable[[int], None] = lambda _n: None,
    ) -> Calibration:
        """Evaluate tokens and measure the magnitudes that each operand reads.

        Args:
            model: A ``llama_model``.
            operands: Operands of the model's file.
            text: Tokens to evaluate, in windows of 512 from all over the text. If None, the model
                generates the text.
            shares: Share of each operand's values to leave out; None for equal shares.
            n_tokens: Most tokens to evaluate.
            n_threads: Number of threads; 0 uses all processors.
            progress: Called with the number of tokens just evaluated.

        Raises:
            ConfigError: The text is empty, or the model has no operands.
            LlmaasError: There is no memory for a context, or the activations cannot be observed.
        """
        if not operands:
            raise ConfigError("the model has no matrices whose channels could be left out")
        if text is not None and len(text) == 0:
            raise ConfigError("there is no text to calibrate with")
        with Evaluator(model, n_threads) as evaluator:
            counted = self._count(evaluator, operands)
            for n_done in _evaluated(evaluator, text, n_tokens):
                progress(n_done)
            return {
                one: _activity(
                    one, counted[one.family], equal_share() if shares is None else shares[one]
                )
                for one in operands
            }

    def foresee(  # noqa: PLR0913 -- model, its calibration, text, and their limits
        self,
        model: Any,
        calibration: Calibration,
        group_layers: int,
        text: Tokens | None = None,
        *,
        n_tokens: int = _N_FORESEEN,
        n_threads: int = 0,
        progress: Callable[[int], None] = lambda _n: None,
    ) -> Calibration:
        """Evaluate tokens, and add how many active channels preloading would foresee.

        Args:
            model: A ``llama_model``.
            calibration: Its calibration.
            group_layers: Layers whose channels are read together.
            text: Tokens to evaluate, as for ``calibrate``.
            n_tokens: Most tokens to evaluate.
            n_threads: Number of threads; 0 uses all processors.
            progress: Called with the number of tokens just evaluated.

        Raises:
            LlmaasError: There is no memory for a context, or the activations cannot be observed.
        """
        with Evaluator(model, n_threads) as evaluator:
            compared = self._compare(evaluator, calibration, group_layers)
            for n_done in _evaluated(evaluator, text, n_tokens):
                progress(n_done)
            return {
                one: replace(activity, foreseen=_foreseen(compared[one.family], one.layer))
                for one, activity in calibration.items()
            }

    def _compare(
        self, evaluator: Evaluator, calibration: Calibration, group_layers: int
    ) -> dict[str, Overlap]:
        """Start comparing layers with those that predict them, by family."""
        context, operands = self.hook_point(evaluator), list(calibration)
        predictors = {
            operands[place]: operands[predictor].layer
            for place, predictor in predictors_of(operands, group_layers).items()
        }
        found = {}
        for family in dict.fromkeys(operand.family for operand in operands):
            same = [operand for operand in operands if operand.family == family]
            found[family] = context.overlap(
                _ACTIVATIONS[family],
                {one.layer: one.n_channels for one in same},
                thresholds={one.layer: calibration[one].thresholds for one in same},
                predictors={one.layer: predictors[one] for one in same if one in predictors},
            )
        return found

    def _count(self, evaluator: Evaluator, operands: Sequence[Operand]) -> dict[str, Magnitudes]:
        """Start counting magnitudes, by family."""
        context = self.hook_point(evaluator)
        widths: dict[str, dict[int, int]] = {}
        for operand in operands:
            widths.setdefault(operand.family, {})[operand.layer] = operand.n_channels
        return {
            family: context.magnitudes(_ACTIVATIONS[family], n_channels)
            for family, n_channels in widths.items()
        }


def _evaluated(evaluator: Evaluator, text: Tokens | None, n_tokens: int) -> Iterator[int]:
    """Evaluate a text, or text that the model writes; yield the numbers of tokens done."""
    return evaluator.generate(n_tokens) if text is None else evaluator.evaluate(text, n_tokens)


def _foreseen(overlap: Overlap, layer: int) -> Share:
    """Return the share of a layer's active channels that are foreseen; 0 without a predictor."""
    used, both = overlap.read(layer)
    return (both / np.maximum(used, 1)).astype(np.float32)


def _activity(operand: Operand, magnitudes: Magnitudes, share: Share) -> Activity:
    counts, sums = magnitudes.read(operand.layer)
    n_rows = int(counts.sum()) / operand.n_channels
    if n_rows == 0 or not np.isfinite(sums).all():
        problem = "are not finite" if n_rows else "do not pass the hook point in the engine"
        raise LlmaasError(
            f"the model cannot be calibrated: some inputs of {operand.weights[0]} "
            f"{problem}. Is the file damaged, or a layer on a GPU?"
        )
    return Activity(_quantiles(counts, share), (sums / n_rows).astype(np.float32), share)


def _quantiles(counts: NDArray[np.uint64], share: Share) -> NDArray[np.float32]:
    """Return the quantiles at these shares, assuming that values are spread evenly in buckets."""
    edges = (np.arange(len(counts) + 1, dtype=np.uint32) << _BUCKET_SHIFT).view(np.float32)
    below = np.concatenate([[0.0], counts.cumsum(dtype=np.float64)])
    return np.interp(share * below[-1], below, edges).astype(np.float32)

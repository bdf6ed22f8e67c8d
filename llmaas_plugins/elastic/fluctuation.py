"""Score units without gradients, by the fluctuation of their values (FLAP, §3.2).

A channel contributes its mean to a product, which a bias can restore, and a fluctuation around it.
The score is the fluctuation: the channel's variance times the squared norm of the column that reads
it (An et al. 2024, Eq 6).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf import quants
from numpy.typing import NDArray

from llmaas_hooks import ConfigError, LlmaasError, NativeContext, Tokens
from llmaas_hooks.native import Activation, Moments
from llmaas_plugins.elastic.units import Blocks, Calibration, Scores
from llmaas_plugins.model.forward import Evaluator, Listener
from llmaas_plugins.model.gguf_header import GGUFTensor, read_header

__all__ = ["METHOD", "ChannelMoments", "Watcher", "calibration_of", "fluctuation_scores"]

METHOD = "fluctuation"

_ROWS = 256
"""Rows of a matrix to dequantize at once."""


@dataclass(frozen=True, slots=True, eq=False)
class ChannelMoments:
    """Moments of the inputs of the output matrices; float64, by layer and channel.

    Attributes:
        head_means: Means of attention results; ``(n_layers, n_groups * group_width)``.
        head_variances: Variances of attention results, shaped as ``head_means``.
        neuron_means: Means of the neurons' outputs; ``(n_layers, n_ff)``.
        neuron_variances: Variances of the neurons' outputs, shaped as ``neuron_means``.
    """

    head_means: NDArray[np.float64]
    head_variances: NDArray[np.float64]
    neuron_means: NDArray[np.float64]
    neuron_variances: NDArray[np.float64]


class Watcher(Listener):
    """Plugin that observes the activations of models loaded while it is active.

    Use it as ``activate(…, {"watcher": Watcher(blocks)})``.
    """

    def __init__(self, blocks: Blocks) -> None:
        """Wait for a model with these blocks."""
        super().__init__()
        self._blocks = blocks

    def moments(
        self,
        evaluator: Evaluator,
        text: Tokens,
        n_tokens: int,
        progress: Callable[[int], None] = lambda _n: None,
    ) -> ChannelMoments:
        """Evaluate ``n_tokens`` tokens of a text and return the moments of the activations.

        Raises:
            LlmaasError: The engine has no hook point, or activations are not finite.
        """
        context, blocks = self.hook_point(evaluator), self._blocks
        n_heads = blocks.n_groups * blocks.group_width
        with (
            _watch(context, "attn_result", blocks, n_heads) as heads,
            _watch(context, "ffn_middle", blocks, blocks.n_ff) as neurons,
        ):
            for n_done in evaluator.evaluate(text, n_tokens):
                progress(n_done)
            return ChannelMoments(*_moments(heads, blocks), *_moments(neurons, blocks))


def fluctuation_scores(
    path: Path, blocks: Blocks, moments: ChannelMoments, calibration: Calibration
) -> Scores:
    """Return the importance of units.

    Raises:
        ConfigError: A matrix has a type that cannot be dequantized.
        StoreError: The model cannot be read.
    """
    tensors = read_header(path).tensors
    content = np.memmap(path, np.uint8, mode="r")

    def norms(matrix: str) -> NDArray[np.float64]:
        matrices = (tensors[f"blk.{i}.{matrix}.weight"] for i in range(blocks.n_layers))
        return np.stack([_column_norms(content, each) for each in matrices])

    heads = moments.head_variances * norms("attn_output")
    return Scores(
        heads.reshape(blocks.n_layers, blocks.n_groups, -1).sum(axis=2),
        moments.neuron_variances * norms("ffn_down"),
        calibration,
    )


def calibration_of(text: Tokens, seed: int, n_tokens: int, method: str) -> Calibration:
    """Return the record of a calibration with a text."""
    digest = hashlib.sha256(np.ascontiguousarray(text, "<i4").tobytes())
    return Calibration(digest.hexdigest(), seed, min(n_tokens, len(text)), method)


# -- inside --------------------------------------------------------------------------------------


def _watch(context: NativeContext, what: Activation, blocks: Blocks, n_channels: int) -> Moments:
    channels: Mapping[int, int] = dict.fromkeys(range(blocks.n_layers), n_channels)
    return context.moments(what, channels)


def _moments(of: Moments, blocks: Blocks) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return means and variances."""
    n_rows, sums, squares = zip(*(of.read(i) for i in range(blocks.n_layers)), strict=True)
    if not all(n_rows) or not np.isfinite(squares).all():
        problem = "are not finite" if all(n_rows) else "do not pass the hook point in the engine"
        raise LlmaasError(
            f"the model cannot be calibrated: some inputs of its output matrices "
            f"{problem}. Is the file damaged, or a layer on a GPU?"
        )
    n = np.array(n_rows)[:, None]
    means = np.stack(sums) / n
    return means, np.maximum(np.stack(squares) / n - means**2, 0)


def _column_norms(content: NDArray[np.uint8], tensor: GGUFTensor) -> NDArray[np.float64]:
    """Return the squared norms of a matrix's columns."""
    rows = content[tensor.at : tensor.at + tensor.n_bytes].reshape(tensor.n_rows, -1)
    norms = np.zeros(tensor.n_columns)
    for first in range(0, tensor.n_rows, _ROWS):
        try:
            values = quants.dequantize(rows[first : first + _ROWS], tensor.type)
        except NotImplementedError as error:
            raise ConfigError(f"cannot dequantize weights of type {tensor.type.name}") from error
        norms += (values.astype(np.float64) ** 2).sum(axis=0)
    return norms

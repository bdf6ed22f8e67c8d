"""Score units without gradients, by the fluctuation of their values (FLAP, §3.2).

A channel contributes its mean to a product, which a bias can restore, and a fluctuation around it.
The score is the fluctuation: the channel's variance times the squared norm of the column that reads
it (An et al. 2024, Eq 6).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import quants
from numpy.typing import NDArray

from llmaas_hooks import ConfigError, LlmaasError, NativeContext, Tokens
from llmaas_hooks.native import Activation, Moments
from llmaas_plugins.elastic.checkpoint import Checkpoint
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
        windows: Sequence[Tokens],
        progress: Callable[[int], None] = lambda _n: None,
        checkpoint: Checkpoint | None = None,
    ) -> ChannelMoments:
        """Evaluate windows of a text and return the moments of the activations.

        Args:
            evaluator: Evaluator of the model.
            windows: Windows of text, as ``Evaluator.cut`` returns them.
            progress: Called with the number of tokens just evaluated.
            checkpoint: Where sums are kept after each window, and where an earlier run kept them.

        Raises:
            LlmaasError: The engine has no hook point, or activations are not finite.
        """
        context, blocks = self.hook_point(evaluator), self._blocks
        sums = _kept(checkpoint, blocks)
        progress(sum(map(len, windows[: sums.n_windows])))
        for window in windows[sums.n_windows :]:
            with (
                _watch(context, "attn_result", blocks, sums.heads.shape[-1]) as heads,
                _watch(context, "ffn_middle", blocks, blocks.n_ff) as neurons,
            ):
                for tokens, _ in evaluator.read(window):
                    progress(len(tokens))
                sums.add(heads, neurons)
            if checkpoint is not None:
                checkpoint.keep(sums.results())
        return sums.moments()


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


class _Sums:
    """Sums of values and of their squares over windows.

    Attributes:
        n_windows: Number of windows.
        n_rows: Numbers of summed rows of attention results and of neurons; ``(2, n_layers)``.
        heads: Sums and sums of squares of attention results; ``(2, n_layers, n_channels)``.
        neurons: Sums and sums of squares of the neurons' outputs; ``(2, n_layers, n_ff)``.
    """

    def __init__(self, blocks: Blocks) -> None:
        n_layers = blocks.n_layers
        self.n_windows, self.n_rows = 0, np.zeros((2, n_layers), np.int64)
        self.heads = np.zeros((2, n_layers, blocks.n_groups * blocks.group_width))
        self.neurons = np.zeros((2, n_layers, blocks.n_ff))

    def add(self, *moments: Moments) -> None:
        """Add the moments of one window: attention results, and neurons."""
        for i, (sums, of) in enumerate(zip((self.heads, self.neurons), moments, strict=True)):
            for layer in range(sums.shape[1]):
                n, values, squares = of.read(layer)
                self.n_rows[i, layer] += n
                sums[0, layer] += values
                sums[1, layer] += squares
        self.n_windows += 1

    def results(self) -> dict[str, NDArray[Any]]:
        """Return copies of the sums, as results of a checkpoint.

        A signal may come while the next window is added.
        """
        about = np.concatenate([[self.n_windows], self.n_rows.ravel()])
        return {"sums": about, "sums.heads": self.heads.copy(), "sums.neurons": self.neurons.copy()}

    def moments(self) -> ChannelMoments:
        """Return means and variances.

        Raises:
            LlmaasError: Activations are not finite, or did not pass the hook point.
        """
        found: list[NDArray[np.float64]] = []
        for n_rows, (sums, squares) in zip(self.n_rows, (self.heads, self.neurons), strict=True):
            if not n_rows.all() or not np.isfinite(squares).all():
                problem = "do not pass the hook point in the engine"
                raise LlmaasError(
                    "the model cannot be calibrated: some inputs of its output matrices "
                    f"{'are not finite' if n_rows.all() else problem}. Is the file damaged, or a "
                    "layer on a GPU?"
                )
            means = sums / n_rows[:, None]
            found += [means, np.maximum(squares / n_rows[:, None] - means**2, 0)]
        return ChannelMoments(*found)


def _kept(checkpoint: Checkpoint | None, blocks: Blocks) -> _Sums:
    """Return the sums of an earlier run, or new ones."""
    sums = _Sums(blocks)
    about = None if checkpoint is None else checkpoint.get("sums")
    if checkpoint is None or about is None:
        return sums
    heads, neurons = checkpoint.get("sums.heads"), checkpoint.get("sums.neurons")
    if heads is not None and neurons is not None and heads.shape == sums.heads.shape:
        sums.n_windows, sums.n_rows = int(about[0]), about[1:].reshape(2, -1).copy()
        sums.heads, sums.neurons = heads.copy(), neurons.copy()
    return sums


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

"""How important units are without gradients: by how much their values fluctuate (FLAP, §3.2).

What a channel adds to a product is its mean, which a bias could put back, and what it differs from
that: its variance times the squared norm of the column that reads it (An et al. 2024, Eq 6).
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
from llmaas_plugins.evaluating import Evaluator, Listener
from llmaas_plugins.gguf_header import Place, read_header

__all__ = ["METHOD", "ChannelMoments", "Watcher", "calibration_of", "fluctuation_scores"]

METHOD = "fluctuation"

_ROWS = 256
"""Of a matrix, at once."""


@dataclass(frozen=True, slots=True, eq=False)
class ChannelMoments:
    """What the values that output matrices read are like; float64, by layer and channel.

    Attributes:
        head_means: Of attention's results; ``(n_layers, n_groups * group_width)``.
        head_variances: Likewise.
        neuron_means: Of the feed-forward blocks' middles; ``(n_layers, n_ff)``.
        neuron_variances: Likewise.
    """

    head_means: NDArray[np.float64]
    head_variances: NDArray[np.float64]
    neuron_means: NDArray[np.float64]
    neuron_variances: NDArray[np.float64]


class Watcher(Listener):
    """Sees activations of models that are loaded while it listens.

    ``activate(…, {"watcher": Watcher(blocks)})``.
    """

    def __init__(self, blocks: Blocks) -> None:
        """Listen."""
        super().__init__()
        self._blocks = blocks

    def moments(
        self,
        evaluator: Evaluator,
        text: Tokens,
        n_tokens: int,
        progress: Callable[[int], None] = lambda _n: None,
    ) -> ChannelMoments:
        """Evaluate so many tokens of a text, and add up what is read.

        Raises:
            LlmaasError: There is no hook point in the engine, or values are not finite.
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
    """How important units are.

    Raises:
        ConfigError: A matrix has a type that cannot be read.
        StoreError: The model cannot be read.
    """
    tensors = read_header(path).tensors
    content = np.memmap(path, np.uint8, mode="r")

    def norms(matrix: str) -> NDArray[np.float64]:
        places = (tensors[f"blk.{i}.{matrix}.weight"] for i in range(blocks.n_layers))
        return np.stack([_column_norms(content, place) for place in places])

    heads = moments.head_variances * norms("attn_output")
    return Scores(
        heads.reshape(blocks.n_layers, blocks.n_groups, -1).sum(axis=2),
        moments.neuron_variances * norms("ffn_down"),
        calibration,
    )


def calibration_of(text: Tokens, seed: int, n_tokens: int, method: str) -> Calibration:
    """What to call a calibration with a text."""
    digest = hashlib.sha256(np.ascontiguousarray(text, "<i4").tobytes())
    return Calibration(digest.hexdigest(), seed, min(n_tokens, len(text)), method)


# -- inside --------------------------------------------------------------------------------------


def _watch(context: NativeContext, what: Activation, blocks: Blocks, n_channels: int) -> Moments:
    channels: Mapping[int, int] = dict.fromkeys(range(blocks.n_layers), n_channels)
    return context.moments(what, channels)


def _moments(of: Moments, blocks: Blocks) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Means and variances."""
    n_rows, sums, squares = zip(*(of.read(i) for i in range(blocks.n_layers)), strict=True)
    if not all(n_rows) or not np.isfinite(squares).all():
        problem = "are not finite" if all(n_rows) else "do not pass the hook point in the engine"
        raise LlmaasError(
            f"the model cannot be calibrated: what its output matrices read, or some of it, "
            f"{problem}. Is the file damaged, or a layer on a GPU?"
        )
    n = np.array(n_rows)[:, None]
    means = np.stack(sums) / n
    return means, np.maximum(np.stack(squares) / n - means**2, 0)


def _column_norms(content: NDArray[np.uint8], place: Place) -> NDArray[np.float64]:
    """Squared, of a matrix's columns."""
    rows = content[place.at : place.at + place.n_bytes].reshape(place.n_rows, -1)
    norms = np.zeros(place.n_columns)
    for first in range(0, place.n_rows, _ROWS):
        try:
            values = quants.dequantize(rows[first : first + _ROWS], place.type)
        except NotImplementedError as error:
            raise ConfigError(f"weights of type {place.type.name} cannot be read") from error
        norms += (values.astype(np.float64) ** 2).sum(axis=0)
    return norms

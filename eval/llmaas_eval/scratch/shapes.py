"""Shapes of the small models: the packaged model's, with fewer channels and fewer layers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from llmaas_eval.models import Shape

__all__ = ["SHAPES", "path_of", "share_of", "trained"]

_N_CTX, _HEAD, _NEURONS = 1024, 32, 3
"""Context in training, width of a head, and neurons for each channel, as in the packaged model."""


def _shape(n_layer: int, n_embd: int) -> Shape:
    n_head = n_embd // _HEAD
    return Shape(n_layer, n_embd, n_head, n_head // 2, _NEURONS * n_embd, _N_CTX)


_WHOLE = _shape(8, 256)

SHAPES: Mapping[float, Shape] = {
    1.0: _WHOLE,
    0.6: _shape(5, 256),
    0.5: _shape(8, 192),
    0.4: _shape(6, 192),
    0.3: _shape(5, 192),
    0.2: _shape(7, 128),
}
"""Shape by level. The weights of its blocks are at least that share of the packaged model's."""


def share_of(shape: Shape) -> float:
    """Return the share of the packaged model's weights in blocks."""
    return shape.n_layer * shape.n_embd**2 / (_WHOLE.n_layer * _WHOLE.n_embd**2)


def path_of(folder: Path, level: float) -> Path:
    """Return the path of the model that stands for a level."""
    return folder / f"scratch-{round(100 * level)}.gguf"


def trained(folder: Path) -> Mapping[float, Path]:
    """Return the models that stand for narrow levels, by the levels.

    Raises:
        FileNotFoundError: One of them is missing.
    """
    found = {level: path_of(folder, level) for level in SHAPES if level < 1}
    if missing := [path for path in found.values() if not path.exists()]:
        raise FileNotFoundError(
            f"{missing[0]} is missing; `python -m llmaas_eval.scratch --out {folder}` makes it"
        )
    return found

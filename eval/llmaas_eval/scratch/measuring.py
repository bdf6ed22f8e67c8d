"""Perplexity of the models that were trained from scratch, and of the packaged model's levels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gguf import GGUFReader

from llmaas_eval.elastic.engine import Variant, readings
from llmaas_eval.elastic.prepared import default_variant, prepared
from llmaas_eval.elastic.texts import Windows
from llmaas_eval.scratch.shapes import SHAPES, path_of, share_of
from llmaas_plugins.elastic.uniform import LEVELS
from llmaas_plugins.reference_model import reference_model_path

__all__ = ["rows_of"]


def rows_of(
    folder: Path, levels: Sequence[float], kinds: Mapping[str, Windows], *, is_quick: bool
) -> Iterator[dict[str, Any]]:
    """Yield the losses of each model and level on each kind of text.

    Args:
        folder: Folder of the models.
        levels: Levels whose models are measured, and our levels to compare them with.
        kinds: Text to read, by kind.
        is_quick: Whether our levels have the widths that need no search.
    """
    reference = reference_model_path()
    ours = default_variant(prepared(reference, folder, is_quick=is_quick), LEVELS)
    for kind, windows in kinds.items():
        found = readings(reference, ours, windows, f"our levels, {kind}")
        for level in levels:
            nats = found[LEVELS.index(level)].nats
            yield _row("ours", level, level, _n_weights(reference), kind, nats.tolist())
        for level in levels:
            path = path_of(folder, level)
            (one,) = readings(path, Variant(path), windows, f"{path.stem}, {kind}")
            share, n_weights = share_of(SHAPES[level]), _n_weights(path)
            yield _row("from scratch", level, share, n_weights, kind, one.nats.tolist())


def _row(  # noqa: PLR0913, PLR0917 -- a row's columns
    model: str, level: float, share: float, n_weights: int, kind: str, nats: list[float]
) -> dict[str, Any]:
    return {
        "model": model,
        "level": level,
        "share": share,
        "n_weights": n_weights,
        "kind": kind,
        "loss": nats,
    }


def _n_weights(path: Path) -> int:
    return sum(int(tensor.n_elements) for tensor in GGUFReader(path).tensors)

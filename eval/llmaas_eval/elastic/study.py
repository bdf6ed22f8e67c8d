"""All parts of the study of elastic models' quality."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from llmaas_eval.elastic.continued import continued
from llmaas_eval.elastic.engine import Variant
from llmaas_eval.elastic.measuring import Material, Measuring
from llmaas_eval.elastic.methods import METHODS
from llmaas_eval.elastic.prepared import default_variant
from llmaas_eval.elastic.rows import FULL, Found, Row
from llmaas_plugins.elastic.units import without_layers
from llmaas_plugins.model.quantize import quantize

__all__ = ["PARTS", "Choices", "study"]


@dataclass(frozen=True, slots=True)
class Choices:
    """Choice of what to measure.

    Attributes:
        parts: Keys in ``PARTS``.
        methods: Keys in ``METHODS``; our own methods are always measured.
        calibrations: Numbers of tokens to score importance on.
        types: Types of the weights, in addition to F16.
        continued: Levels at which contexts begin and continue.
    """

    parts: Sequence[str]
    methods: Sequence[str]
    calibrations: tuple[int, ...] = (1 << 10, 1 << 11, 1 << 12, 1 << 13, 1 << 14, 1 << 15, 1 << 16)
    types: tuple[str, ...] = ("Q8_0", "Q4_0")
    continued: tuple[float, ...] = (1.0, 0.8, 0.5, 0.3)


def study(material: Material, choices: Choices) -> Found:
    """Measure the parts of the choices; the others are empty."""
    measuring = Measuring(material)
    return {
        part: [measuring.full, *measure(measuring, choices)] if part in choices.parts else []
        for part, measure in PARTS.items()
    }


def _levels(measuring: Measuring, choices: Choices) -> list[Row]:
    """Measure all methods (Fig 10a)."""
    rows = []
    for name, variant in measuring.ours.items():
        rows += measuring.rows(name, variant)
    for name in choices.methods:
        rows += METHODS[name](measuring, name)
    return rows


def _layers(measuring: Measuring, _: Choices) -> list[Row]:
    """Measure the model without each single layer (Fig 10b)."""
    source, blocks = measuring.of.source, measuring.blocks
    removed = [without_layers(blocks, [i]) for i in range(blocks.n_layers)]
    found = measuring.read("layers", Variant(source, blocks, removed))
    share = blocks.share(removed[0])
    return [Row(str(i), share, share, reading) for i, reading in enumerate(found)]


def _calibration(measuring: Measuring, choices: Choices) -> list[Row]:
    """Measure importance scored on different numbers of tokens."""
    from llmaas_plugins.elastic.gradients import gradient_scores

    rows, windows = [], measuring.of.calibration
    for n_tokens in choices.calibrations:
        some = windows[: max(1, n_tokens // windows.shape[1])]
        rows += measuring.ordered(f"{some.size:,}", gradient_scores(measuring.of.source, some))
    return rows


def _types(measuring: Measuring, choices: Choices) -> list[Row]:
    """Measure other types of weights in the same order, at the plugin's widths (Fig 19a)."""
    rows, levels = [], (1.0, *measuring.of.levels)
    for name in ("F16", *choices.types):
        path = measuring.of.prepared
        if name != "F16":
            path = quantize(path, measuring.of.folder / f"{name}.gguf", name)
        rows += measuring.rows(name, default_variant(path, levels), levels)
    return rows


def _continued(measuring: Measuring, choices: Choices) -> list[Row]:
    """Measure contexts that change their level."""
    of = measuring.of
    found = continued(of.prepared, of.windows, choices.continued, of.folder)
    return [Row(f"from {before:.0%}", then, then, reading) for before, then, reading in found]


def _kinds(measuring: Measuring, _: Choices) -> list[Row]:
    """Measure the prepared file on several kinds of text."""
    rows = []
    for kind, windows in measuring.of.kinds.items():
        found = Measuring(replace(measuring.of, windows=windows))
        rows.append(found.full._replace(method=f"{FULL}: {kind}"))
        for name, variant in found.ours.items():
            rows += found.rows(f"{name}: {kind}", variant)
    return rows


PARTS: Mapping[str, Callable[[Measuring, Choices], list[Row]]] = {
    "levels": _levels,
    "layers": _layers,
    "calibration": _calibration,
    "types": _types,
    "continued": _continued,
    "kinds": _kinds,
}
"""Function that measures each part, by the part's name."""

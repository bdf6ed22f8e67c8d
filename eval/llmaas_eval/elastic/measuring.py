"""Measurements of smaller models made from one source model, compared with the source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from llmaas_eval.elastic.engine import Variant, readings
from llmaas_eval.elastic.prepared import variants
from llmaas_eval.elastic.readings import Reading
from llmaas_eval.elastic.rows import FULL, Row
from llmaas_eval.elastic.texts import Windows
from llmaas_plugins.elastic.metadata import read_elastic
from llmaas_plugins.elastic.prepared_file import write_reordered
from llmaas_plugins.elastic.reordering import order_by
from llmaas_plugins.elastic.units import Scores, Widths, blocks_of

__all__ = ["Material", "Measuring"]


@dataclass(frozen=True, slots=True)
class Material:
    """Models, texts and levels of the study.

    Attributes:
        source: F16 GGUF of the full model.
        prepared: Output of ``llmaas elastic prepare`` for the source.
        windows: Test text.
        calibration: Text to score importance on, for methods that score it in this study.
        levels: Shares of the blocks' bytes, largest first. K and V projections count if the
            prepared file cuts them.
        folder: Folder for temporary model files.
        kinds: Test text of other kinds, by the kind's name.
    """

    source: Path
    prepared: Path
    windows: Windows
    calibration: Windows
    levels: Sequence[float]
    folder: Path
    kinds: Mapping[str, Windows] = field(default_factory=dict)


class Measuring:
    """Measurements on one set of material.

    Attributes:
        of: The material.
        blocks: Units of the source model, cut as the prepared file's.
        ours: Variants of the prepared file, by name.
        calibration: Calibration text for other methods, as long as the prepared file's.
        full: Result of the source model.
    """

    def __init__(self, of: Material) -> None:
        """Measure the source model."""
        self.of, self.ours = of, variants(of.prepared, of.levels)
        prepared = read_elastic(of.prepared)
        assert prepared is not None
        self.blocks = blocks_of(of.source, cuts_keys_values=prepared.blocks.cuts_keys_values)
        self.calibration = of.calibration[: _n_windows(of)]
        (reading,) = self.read(FULL, Variant(of.source))
        self.full = Row(FULL, 1.0, 1.0, reading)

    def read(self, name: str, variant: Variant) -> list[Reading]:
        """Return the variant's readings by level, compared with the source."""
        return readings(self.of.source, variant, self.of.windows, name)

    def rows(self, name: str, variant: Variant, levels: Sequence[float] = ()) -> list[Row]:
        """Return a row for each level of a variant; by default, the levels are the material's."""
        found = zip(levels or self.of.levels, variant.levels, self.read(name, variant), strict=True)
        return [
            Row(name, level, self.blocks.share(widths), reading) for level, widths, reading in found
        ]

    def ordered(
        self, name: str, scores: Scores, widths: Sequence[Widths] | None = None
    ) -> list[Row]:
        """Measure the source with units ordered by ``scores``, by default at our uniform widths."""
        path = self.of.folder / f"{name}.gguf"
        for _ in write_reordered(self.of.source, path, order_by(self.blocks, scores)):
            pass
        try:
            levels = widths or self.ours["uniform"].levels
            return self.rows(name, Variant(path, self.blocks, levels))
        finally:
            path.unlink()


def _n_windows(of: Material) -> int:
    """Return how many calibration windows the prepared file's scores used; at least 1."""
    prepared = read_elastic(of.prepared)
    n_tokens = prepared.calibration.n_tokens if prepared else 0
    return max(1, n_tokens // of.calibration.shape[1])

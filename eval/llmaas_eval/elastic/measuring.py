"""Models of one source, read beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
    """What is measured, and with what.

    Attributes:
        source: The model, F16.
        prepared: What ``llmaas elastic prepare`` made of it.
        windows: Text that is read.
        calibration: Text that importance is from, where it is found here.
        levels: Shares of the blocks' bytes, K and V projections apart; widest first.
        folder: For models that are made on the way.
    """

    source: Path
    prepared: Path
    windows: Windows
    calibration: Windows
    levels: Sequence[float]
    folder: Path


class Measuring:
    """Reads with models.

    Attributes:
        of: What is measured.
        blocks: Of the source.
        ours: Its levels, by name.
        calibration: Text that others' importance is from: as much as ours is from.
        full: How the source reads.
    """

    def __init__(self, of: Material) -> None:
        """Read with the source."""
        self.of, self.blocks = of, blocks_of(of.source)
        self.ours = variants(of.prepared, of.levels)
        self.calibration = of.calibration[: _n_windows(of)]
        (reading,) = self.read(FULL, Variant(of.source))
        self.full = Row(FULL, 1.0, 1.0, reading)

    def read(self, name: str, variant: Variant) -> list[Reading]:
        """By level, beside the source."""
        return readings(self.of.source, variant, self.of.windows, name)

    def rows(self, name: str, variant: Variant, levels: Sequence[float] = ()) -> list[Row]:
        """Of a variant that has these levels; those of the material if there are none."""
        found = zip(levels or self.of.levels, variant.levels, self.read(name, variant), strict=True)
        return [
            Row(name, level, self.blocks.share(widths), reading) for level, widths, reading in found
        ]

    def ordered(
        self, name: str, scores: Scores, widths: Sequence[Widths] | None = None
    ) -> list[Row]:
        """Units in another order; in the widths of our uniform table unless others are given."""
        path = self.of.folder / f"{name}.gguf"
        for _ in write_reordered(self.of.source, path, order_by(self.blocks, scores)):
            pass
        try:
            levels = widths or self.ours["uniform"].levels
            return self.rows(name, Variant(path, self.blocks, levels))
        finally:
            path.unlink()


def _n_windows(of: Material) -> int:
    """That ours is from; some at least."""
    prepared = read_elastic(of.prepared)
    n_tokens = prepared.calibration.n_tokens if prepared else 0
    return max(1, n_tokens // of.calibration.shape[1])

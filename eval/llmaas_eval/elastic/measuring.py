"""Models of one source, read beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from llmaas_eval.elastic.engine import Variant, readings
from llmaas_eval.elastic.prepared import variants
from llmaas_eval.elastic.readings import Reading, mixed
from llmaas_eval.elastic.rows import FULL, Row
from llmaas_eval.elastic.sizes import kept_layers, kv_bytes
from llmaas_eval.elastic.texts import Windows
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
        calibration: Text that others' importance is from.
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
        full: How the source reads.
    """

    def __init__(self, of: Material) -> None:
        """Read with the source."""
        self.of, self.blocks = of, blocks_of(of.source)
        self.ours = variants(of.prepared, of.levels)
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

    def layers(self, name: str, by_kept: Mapping[int, Reading]) -> list[Row]:
        """Whole layers, for as many bytes as each level has.

        They seldom come to as many. So there is a row of the next larger number of layers, in the
        method's favour, and one between that and the next smaller.

        Args:
            name: Of the method.
            by_kept: How it reads, by the number of layers that are kept.
        """
        rows, n_layers, n_kv_bytes = [], self.blocks.n_layers, kv_bytes(self.of.source)
        for level in self.of.levels:
            kept = kept_layers(self.blocks, n_kv_bytes, level)
            most = by_kept[kept.n]
            rows.append(Row(name, level, kept.n / n_layers, most))
            if kept.n > 1:
                between = mixed(by_kept[kept.n - 1], most, kept.share)
                share = (kept.n - 1 + kept.share) / n_layers
                rows.append(Row(f"{name}, interpolated", level, share, between))
        return rows

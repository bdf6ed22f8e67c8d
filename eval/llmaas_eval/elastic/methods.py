"""Other ways to shrink a model to as many bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from llmaas_eval.elastic.readings import Reading, mixed
from llmaas_eval.elastic.rows import Row
from llmaas_eval.elastic.sizes import kept_layers, kv_bytes
from llmaas_plugins.elastic.prepared_file import write_reordered
from llmaas_plugins.elastic.reordering import order_by
from llmaas_plugins.elastic.units import Blocks, Scores, blocks_of

__all__ = ["ordered", "rows_of_layers"]


def ordered(source: Path, scores: Scores, folder: Path, name: str) -> Path:
    """A copy of a model in ``folder``, with each layer's most important units first."""
    path = folder / f"{name}.gguf"
    for _ in write_reordered(source, path, order_by(blocks_of(source), scores)):
        pass
    return path


def rows_of_layers(
    name: str, source: Path, blocks: Blocks, levels: Sequence[float], by_kept: Mapping[int, Reading]
) -> Iterator[Row]:
    """What a method that removes whole layers makes of as many bytes as each level has.

    Whole layers seldom come to as many bytes. So there is a row of the next larger number of
    layers, in the method's favour, and one between that and the next smaller.

    Args:
        name: Of the method.
        source: The model.
        blocks: Of it.
        levels: Shares of the blocks' bytes, K and V projections apart; layers go with theirs.
        by_kept: How it reads, by the number of layers that are kept.
    """
    n_kv_bytes = kv_bytes(source)
    for level in levels:
        kept = kept_layers(blocks, n_kv_bytes, level)
        most = by_kept[kept.n]
        yield Row(name, level, kept.n / blocks.n_layers, most)
        if kept.n > 1:
            between = mixed(by_kept[kept.n - 1], most, kept.share)
            share = (kept.n - 1 + kept.share) / blocks.n_layers
            yield Row(f"{name}, interpolated", level, share, between)

"""Small models prepared with uniform widths and units in their original order."""

from __future__ import annotations

from collections import deque

import numpy as np

from llmaas_plugins.elastic.metadata import Elastic
from llmaas_plugins.elastic.prepared_file import write_prepared
from llmaas_plugins.elastic.reordering import Order
from llmaas_plugins.elastic.units import Calibration, Widths, blocks_of

TENTHS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)


def prepare(source, path, *, tables=("uniform",), biases=(), levels=TENTHS, **options):
    """Write the prepared file; ``biases`` names the tables that have biases.

    The other options are those of ``blocks_of``.
    """
    blocks = blocks_of(source, **options)
    order = Order(
        np.tile(np.arange(blocks.n_groups, dtype=np.uint32), (blocks.n_layers, 1)),
        np.tile(np.arange(blocks.n_ff, dtype=np.uint32), (blocks.n_layers, 1)),
    )
    rng = np.random.default_rng(0)
    shape = len(levels), blocks.n_layers, 2, blocks.n_embd
    elastic = Elastic(
        blocks=blocks,
        levels=levels,
        step=blocks.granule,
        tables={name: tuple(_widths(blocks, share) for share in levels) for name in tables},
        anchors=(),
        calibration=Calibration("0" * 64, 0, 0, "none"),
        source=None,
        biases={name: rng.normal(0, 0.1, shape).astype(np.float16) for name in biases},
    )
    deque(write_prepared(source, path, elastic, order), maxlen=0)
    return path


def _widths(blocks, share):
    """Return equal widths for all layers."""
    groups = max(1, int(share * blocks.n_groups))
    neurons = max(1, int(share * blocks.n_ff / blocks.granule)) * blocks.granule
    return Widths(
        np.full(blocks.n_layers, groups, np.int32), np.full(blocks.n_layers, neurons, np.int32)
    )

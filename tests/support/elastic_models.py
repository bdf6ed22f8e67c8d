"""Models prepared for elastic with random unit orders, and the logits of vanilla llama.cpp."""

from __future__ import annotations

import contextlib
from collections import deque

import llama_cpp
import numpy as np

from llmaas_plugins.elastic.adapters import Adapter
from llmaas_plugins.elastic.metadata import Elastic
from llmaas_plugins.elastic.parts import COLUMNS, ROWS
from llmaas_plugins.elastic.prepared_file import write_prepared
from llmaas_plugins.elastic.reordering import order_by
from llmaas_plugins.elastic.uniform import LEVELS, step_of, uniform_widths
from llmaas_plugins.elastic.units import Calibration, Scores, blocks_of

TOKENS = list(range(5, 45))


def scores_of(blocks, seed=0):
    """Return random scores."""
    rng = np.random.default_rng(seed)
    groups, neurons = (rng.random((blocks.n_layers, n)) for n in (blocks.n_groups, blocks.n_ff))
    return Scores(groups, neurons, Calibration("0" * 64, seed, 0, "random"))


def elastic_of(blocks):
    """Return the metadata of a file that was prepared with random scores."""
    step = step_of(blocks)
    uniform = uniform_widths(blocks, LEVELS, np.zeros(blocks.n_layers), step)
    calibration = Calibration("0" * 64, 0, 0, "random")
    return Elastic(blocks, LEVELS, step, {"uniform": uniform}, (), calibration, None, {})


def shuffled(source, path, seed=0, order=None, **options):
    """Prepare a model with its units in a random order or in ``order``.

    The options are those of ``blocks_of``.
    """
    blocks = blocks_of(source, **options)
    order = order or order_by(blocks, scores_of(blocks, seed))
    write(write_prepared(source, path, elastic_of(blocks), order))
    return path


def write(writing):
    """Write the whole prepared file."""
    deque(writing, maxlen=0)


def adapters_of(blocks, levels, rank=2, seed=0, size=0.1):
    """Return random adapters of all weights; the size is that of A's and B's values."""
    rng = np.random.default_rng(seed)
    units = {"attn": blocks.n_groups * blocks.group_width, "ffn_": blocks.n_ff}

    def adapter(matrix):
        n_in, n_out = blocks.n_embd, units[matrix[:4]]
        if matrix in COLUMNS:
            n_in, n_out = n_out, n_in
        a, b = rng.normal(0, size, (rank, n_in)), rng.normal(0, size, (n_out, rank))
        return Adapter(a.astype(np.float32), b.astype(np.float32))

    names = {
        f"blk.{i}.{one}.weight": one for i in range(blocks.n_layers) for one in (*ROWS, *COLUMNS)
    }
    return {level: {name: adapter(one) for name, one in names.items()} for level in levels}


def logits_of(path):
    """Return vanilla logits computed with 32-bit cells.

    16-bit cells would round away small differences.
    """
    settings = {"type_k": llama_cpp.GGML_TYPE_F32, "type_v": llama_cpp.GGML_TYPE_F32}
    llama = llama_cpp.Llama(
        str(path), n_ctx=64, logits_all=True, n_threads=1, verbose=False, **settings
    )
    with contextlib.closing(llama):
        llama.eval(TOKENS)
        return llama.scores[: len(TOKENS)].copy()

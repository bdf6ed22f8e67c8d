"""Ranges of cells, read through a sequence of the plugin's own."""

from __future__ import annotations

import llama_cpp
import numpy as np
import pytest

from llmaas_eval.models import SHAPE_TINY, write_random_model
from llmaas_plugins.kv_chunks.parking.sequences import SCRATCH_SEQUENCE, SEQUENCES
from llmaas_plugins.kv_chunks.transfer.cells import KVCells

N = 40


@pytest.fixture
def ctx(tmp_path):
    """Yield a context with ``N`` tokens in sequence 0."""
    path = write_random_model(tmp_path / "tiny.gguf", SHAPE_TINY)
    model = llama_cpp.llama_model_load_from_file(
        str(path).encode(), llama_cpp.llama_model_default_params()
    )
    params = llama_cpp.llama_context_default_params()
    params.n_ctx, params.n_seq_max, params.kv_unified = 256, SEQUENCES, True
    params.n_threads = params.n_threads_batch = 1
    ctx = llama_cpp.llama_init_from_model(model, params)
    tokens = (llama_cpp.llama_token * N)(*range(300, 300 + N))
    assert llama_cpp.llama_decode(ctx, llama_cpp.llama_batch_get_one(tokens, N)) == 0
    yield ctx
    llama_cpp.llama_free(ctx)
    llama_cpp.llama_model_free(model)


def test_labels_that_ctrl_c_left_are_not_read(ctx):
    cells, memory = KVCells(ctx), llama_cpp.llama_get_memory(ctx)

    def read():
        blob = np.zeros(cells.size(0, 16), np.uint8)
        assert cells.read(0, 16, blob) == blob.nbytes
        return blob.tobytes()

    expected = read()
    llama_cpp.llama_memory_seq_cp(memory, 0, SCRATCH_SEQUENCE, 20, 30)
    assert read() == expected
    llama_cpp.llama_memory_seq_cp(memory, 0, SCRATCH_SEQUENCE, 20, 30)
    blob = np.zeros(len(expected), np.uint8)
    assert cells.read(0, 16, blob) == len(expected)
    assert blob.tobytes() == expected

"""Embeddings in a file: only those of a batch's tokens are read, and results stay the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from claiming import Claimer, decode, evaluate, native, opened, step, vanilla
from gguf import GGMLQuantizationType
from llama_cpp import llama_cpp as raw
from unreadable import unreadable

from llmaas_eval.models import Shape, write_random_model
from llmaas_hooks import WeightClaim
from llmaas_patches.native.packing import model_tensors
from llmaas_plugins.machine import release_memory

SHAPE = Shape(n_layer=2, n_embd=544, n_head=17, n_head_kv=17, n_ff=512, n_ctx=512)
"""A shape with embedding rows that cross page boundaries."""
EMBEDDINGS = WeightClaim(r"token_embd\.weight", source="file")
PAGE = 4096


@pytest.fixture(scope="module", params=["F16", "Q4_0"])
def model(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("embeddings") / "model.gguf"
    return write_random_model(path, SHAPE, GGMLQuantizationType[request.param])


def test_logits_are_those_of_llama_cpp(model):
    expected = vanilla(model)
    with native(plugin=Claimer(EMBEDDINGS)), opened(model) as ctx:
        for _ in range(2):
            assert np.array_equal(evaluate(ctx), expected)


def test_a_token_costs_a_read_of_its_own_row(model):
    plugin = Claimer(EMBEDDINGS)
    info = model_tensors(model)["token_embd.weight"]
    row = info.n_bytes // info.shape[1]
    with native(plugin=plugin), opened(model) as ctx:
        stats = plugin.contexts[0].file_weights().stats
        for n, tokens in enumerate([[5], list(range(7, 107))]):
            before = stats()["read_bytes"]
            step(ctx, tokens, n)
            n_read = stats()["read_bytes"] - before
            assert len(tokens) * row <= n_read <= len(tokens) * (row + 2 * PAGE)


@pytest.mark.slow
def test_no_memory_is_held_for_them(tmp_path):
    shape = Shape(n_layer=1, n_embd=2560, n_head=20, n_head_kv=1, n_ff=256, n_ctx=512)
    path = write_random_model(tmp_path / "model.gguf", shape, GGMLQuantizationType.F16)
    n_bytes = model_tensors(path)["token_embd.weight"].n_bytes
    with native(plugin=Claimer()), opened(path, load_mode=raw.LLAMA_LOAD_MODE_DIRECT_IO) as ctx:
        evaluate(ctx)
        with_them = anonymous_bytes()
    with (
        native(plugin=Claimer(EMBEDDINGS)),
        opened(path, load_mode=raw.LLAMA_LOAD_MODE_DIRECT_IO) as ctx,
    ):
        evaluate(ctx)
        # the heap that other tests left in this process varies by some MB
        assert anonymous_bytes() < with_them - 0.5 * n_bytes


def anonymous_bytes():
    """Return this process's memory that no file backs."""
    release_memory()
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))


def test_a_row_that_cannot_be_read_fails_the_batch(model, tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(model.read_bytes())
    expected = vanilla(model)
    with (
        native(plugin=Claimer(EMBEDDINGS)),
        opened(path, load_mode=raw.LLAMA_LOAD_MODE_DIRECT_IO) as ctx,
    ):
        with unreadable(path):
            assert decode(ctx, range(10, 20), 0) != 0
        assert np.array_equal(evaluate(ctx), expected)

"""Files that cannot be read for a while: the batch fails, and later answers are right again."""

from __future__ import annotations

import contextlib
import ctypes

import numpy as np
import pytest
from channel_claims import attach, claim_all
from claiming import Claimer, created, decode, loaded, native
from failed_reads import CONTEXT, N_ANSWER, answer, check_in_a_child_and_here, fails, fill_with_nan
from gguf import GGUFReader
from llama_cpp import llama_cpp as raw
from packed_models import pack
from unreadable import unreadable

from llmaas_eval.models import copy_field, finish, open_writer
from llmaas_hooks import WeightClaim

EXPERTS = r"blk\.\d+\.ffn_{}_exps\.weight"
BATCH = range(10, 70)


@contextlib.contextmanager
def claimed(path, *claims, **settings):
    """Open a model with these claims; yield a context, and the plugin that claims."""
    plugin = Claimer(*claims)
    with (
        native(plugin=plugin),
        loaded(path, **settings) as model,
        created(model, **CONTEXT) as ctx,
    ):
        yield ctx, plugin


# -- experts ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mixture(family, tmp_path_factory):
    """Return a mixture whose experts have two types but one size, so that they share slots."""
    path = tmp_path_factory.mktemp("mixture") / "model.gguf"
    source, other = (GGUFReader(family("llama-moe", weights)) for weights in ("Q4_0", "Q4_K"))
    downs = {tensor.name: tensor for tensor in other.tensors if "ffn_down_exps" in tensor.name}
    writer = open_writer(path, "llama")
    for name, entry in source.fields.items():
        if not name.startswith(("GGUF.", "general.architecture")):
            copy_field(writer, entry)
    for tensor in source.tensors:
        found = downs.get(tensor.name, tensor)
        writer.add_tensor(found.name, found.data, raw_dtype=found.tensor_type)
    return finish(writer, path)


def stock(path, **settings):
    """Return what stock llama.cpp answers."""
    with loaded(path, **settings) as model, created(model, **CONTEXT) as ctx:
        return answer(ctx)


@pytest.mark.slow
def test_experts(mixture):
    """A slot with an expert of another type would leave NaN in the cells."""
    packed = pack(mixture)
    claim = WeightClaim(EXPERTS.format(r"\w+"), source="file", path=str(packed))
    expected = stock(mixture)
    with claimed(mixture, claim) as (ctx, plugin):
        plugin.contexts[0].file_weights().set_memory(0, 0)

        def recover():
            assert np.array_equal(answer(ctx), expected)
            assert fails(ctx, packed, BATCH)
            assert np.array_equal(answer(ctx), expected)

        check_in_a_child_and_here(recover)


@pytest.mark.parametrize("read_size", [0, 4096], ids=["as before", "read in other pieces"])
def test_experts_of_a_graph_that_is_stopped(mixture, tmp_path, read_size):
    """Nobody has seen yet that the experts of a later product could not be read."""
    packed, left = pack(mixture), [10**9]
    second = tmp_path / packed.name
    second.write_bytes(packed.read_bytes())
    paths = {"up": packed, "down": second}

    @raw.ggml_abort_callback
    def abort(_user):
        left[0] -= 1
        return left[0] < 0

    claims = [
        WeightClaim(EXPERTS.format(name), source="file", path=str(path))
        for name, path in paths.items()
    ]
    with claimed(mixture, *claims) as (ctx, plugin):
        weights, found = plugin.contexts[0].file_weights(), set()
        raw.llama_set_abort_callback(ctx, abort, None)
        expected = answer(ctx)
        for n_calls in range(60):
            for n_bytes in (0, 1 << 30):  # forget most experts, then have room to read ahead
                weights.set_memory(n_bytes, 0)
            with unreadable(second):
                left[0] = n_calls
                found.add(decode(ctx, [9], N_ANSWER))
                left[0] = 10**9
            weights.set_reading(read_size=read_size if n_calls % 2 else 0)
            assert np.array_equal(answer(ctx), expected)
    assert found == {2, -3}


# -- rows and channels ------------------------------------------------------------------------


@contextlib.contextmanager
def fresh_memory_is_nan():
    """Make malloc() fill memory with bytes that are NaN in F16 and F32."""
    perturb, libc = -6, ctypes.CDLL(None)
    assert libc.mallopt(perturb, 0xFF ^ 0x7F)
    try:
        yield
    finally:
        libc.mallopt(perturb, 0)


@pytest.mark.parametrize("weights", ["F16", "Q4_0"])
def test_rows_of_embeddings(family, tmp_path, weights):
    """The failed batch has more rows than any before, so they are in new memory."""
    path = tmp_path / "model.gguf"
    path.write_bytes(family("llama", weights).read_bytes())
    claim = WeightClaim(r"token_embd\.weight", source="file")
    settings = {"load_mode": raw.LLAMA_LOAD_MODE_DIRECT_IO, "use_extra_bufts": False}
    expected = stock(path, **settings)
    with claimed(path, claim, **settings) as (ctx, _plugin):

        def recover():
            assert np.array_equal(answer(ctx), expected)
            with fresh_memory_is_nan():
                assert fails(ctx, path, BATCH)
            assert np.array_equal(answer(ctx), expected)

        check_in_a_child_and_here(recover)


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["recent", "busiest", "streamed"])
def test_channels(reference_model, channels, cache):
    """The failed token takes the cell with NaN, and must not leave what its memory held before."""
    file = channels(1)
    claim = claim_all(reference_model)
    with claimed(reference_model, claim, use_extra_bufts=False) as (ctx, plugin):
        weights = attach(plugin, file, share=0.5, cache=cache)
        weights.set_memory(1 << 20, 0)  # too little to read a whole token's weights ahead
        expected = answer(ctx, n_prompt=0)

        def recover():
            assert np.array_equal(answer(ctx, n_prompt=0), expected)
            fill_with_nan(ctx)
            assert fails(ctx, file.path, [9])
            assert np.array_equal(answer(ctx, n_prompt=0), expected)

        check_in_a_child_and_here(recover)

"""Weights in files, some of them kept in memory: what is computed is what is computed in memory."""

from __future__ import annotations

import re

import numpy as np
import pytest
from claiming import Claimer, claimed, created, evaluate, loaded, native, opened, vanilla
from gguf import GGMLQuantizationType
from matrices import ROWS, TYPES, UP, zeroed

from llmaas_eval.models import Shape, write_random_model
from llmaas_hooks import ConfigError, PluginError, WeightClaim
from llmaas_patches.native.packing import model_tensors, repack
from llmaas_plugins.flash_weights.packed import can_be_streamed, packed_path, write_packed

SHAPE = Shape(n_layer=3, n_embd=512, n_head=8, n_head_kv=4, n_ff=9024, n_ctx=512)
"""Its wide matrices are two pieces each, of which the second is short."""
ARENA = 8 << 20


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("wide") / "model.gguf"
    return write_random_model(path, SHAPE, GGMLQuantizationType.Q8_0)


def pack(path):
    """The packed file of a model, made unless it is there."""
    packed = packed_path(path)
    if not packed.exists():
        list(write_packed(path, packed, model_tensors(path), repack))
    return packed


def claim_all(path, *, is_packed=False):
    """All that can be in a file, and how many bytes that is."""
    infos = {
        name: info for name, info in model_tensors(path).items() if can_be_streamed(name, info)
    }
    pattern = "|".join(map(re.escape, infos))
    packed = str(pack(path)) if is_packed else None
    n_bytes = sum(info.n_bytes for info in infos.values())
    return WeightClaim(pattern, source="file", path=packed), n_bytes


@pytest.mark.parametrize("weights", TYPES)
@pytest.mark.parametrize("name", ROWS)
def test_a_packed_model_is_what_llama_cpp_computes_by_default(family, name, weights):
    path = family(name, weights)
    claim, _ = claim_all(path, is_packed=True)
    assert np.array_equal(claimed(path, claim), vanilla(path))


@pytest.mark.parametrize("is_packed", [False, True], ids=["as it is", "packed"])
def test_any_share_of_the_weights_may_be_in_memory(model, is_packed):
    claim, n_bytes = claim_all(model, is_packed=is_packed)
    expected = vanilla(model, use_extra_bufts=is_packed)
    plugin = Claimer(claim)
    with native(plugin=plugin), opened(model, use_extra_bufts=is_packed) as ctx:
        weights = plugin.contexts[0].file_weights()
        assert weights.stats()["bytes"] == n_bytes
        for share in (0, 0.3, 0.8, 1, 0.5, 0):
            weights.set_memory(int(share * n_bytes), ARENA)
            for _ in range(2):
                assert np.array_equal(evaluate(ctx), expected)
            kept = weights.stats()["kept_bytes"]
            assert share * n_bytes - (3 << 20) < kept <= share * n_bytes


def test_nothing_is_read_once_all_is_in_memory(model):
    claim, n_bytes = claim_all(model)
    plugin = Claimer(claim)
    with native(plugin=plugin), opened(model) as ctx:
        weights = plugin.contexts[0].file_weights()
        weights.set_memory(n_bytes, ARENA)
        evaluate(ctx)
        evaluate(ctx)
        before = weights.stats()
        evaluate(ctx)
        assert weights.stats() == before


def test_each_weight_is_read_once_a_batch_and_nothing_in_vain(model):
    claim, n_bytes = claim_all(model)
    plugin = Claimer(claim)
    with native(plugin=plugin), opened(model) as ctx:
        weights = plugin.contexts[0].file_weights()
        weights.set_memory(0, ARENA)
        evaluate(ctx)
        before = weights.stats()["read_bytes"]
        evaluate(ctx)  # three batches
        read = weights.stats()["read_bytes"] - before
        assert read == pytest.approx(3 * n_bytes, rel=0.02)  # whole pages
        assert weights.stats()["wasted_bytes"] == 0


def test_an_arena_of_two_pieces_is_enough(model):
    claim, _ = claim_all(model)
    plugin = Claimer(claim)
    expected = vanilla(model, use_extra_bufts=False)
    with native(plugin=plugin), opened(model, use_extra_bufts=False) as ctx:
        plugin.contexts[0].file_weights().set_memory(0, 0)
        assert np.array_equal(evaluate(ctx), expected)
        assert plugin.contexts[0].file_weights().stats()["arena_bytes"] < 12 << 20


def test_contexts_of_a_model_share_its_weights(model):
    claim, n_bytes = claim_all(model)
    plugin = Claimer(claim)
    expected = vanilla(model, use_extra_bufts=False)
    with (
        native(plugin=plugin),
        loaded(model, use_extra_bufts=False) as llama,
        created(llama) as one,
        created(llama) as two,
    ):
        first, second = (context.file_weights() for context in plugin.contexts)
        first.set_memory(n_bytes // 2, ARENA)
        for ctx in (one, two, one):
            assert np.array_equal(evaluate(ctx), expected)
        assert first.stats() == second.stats()


def test_a_part_of_a_packed_weight(family, tmp_path):
    path = family("llama", "Q4_0")
    expected = vanilla(zeroed(path, tmp_path / "zeroed.gguf", UP, rows=64))
    claim = WeightClaim(UP, source="file", path=str(pack(path)), rows=(60,))
    assert np.array_equal(claimed(path, claim), expected)


def test_columns_of_a_packed_weight_are_refused(family):
    path = family("llama", "Q4_0")
    claim = WeightClaim(UP, source="file", path=str(pack(path)), columns=(64,))
    with (
        pytest.raises(PluginError, match="its columns cannot be cut"),
        native(plugin=Claimer(claim)),
        opened(path),
    ):
        pass


def test_a_packed_file_of_another_model_is_refused(family, model):
    path = family("llama", "Q4_0")
    claim = WeightClaim(UP, source="file", path=str(pack(model)))
    with (
        pytest.raises((ConfigError, PluginError), match="is not of this model"),
        native(plugin=Claimer(claim)),
        opened(path),
    ):
        pass

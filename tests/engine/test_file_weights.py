"""Weights in files, some of them kept in memory: results equal those computed from memory."""

from __future__ import annotations

import contextlib
import re

import numpy as np
import pytest
from claiming import (
    OFF,
    Claimer,
    claimed,
    created,
    decode,
    evaluate,
    loaded,
    native,
    opened,
    step,
    vanilla,
    vanilla_once,
)
from gguf import GGMLQuantizationType
from llama_cpp import llama_cpp as raw
from matrices import CUT, DOWN, ROWS, TYPES, UP, columns_of, zeroed
from packed_models import pack
from unreadable import unreadable

from llmaas_eval.models import Shape, write_random_model
from llmaas_hooks import ConfigError, PluginError, WeightClaim
from llmaas_patches.native.packing import model_tensors
from llmaas_plugins.flash_weights.packed import streamable

SHAPE = Shape(n_layer=2, n_embd=512, n_head=8, n_head_kv=4, n_ff=9024, n_ctx=512)
"""A shape whose wide matrices have two pieces each; the second piece is short."""
ARENA = 8 << 20
COMPUTING = 16 << 20
"""More than batches need for computing."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("wide") / "model.gguf"
    return write_random_model(path, SHAPE, GGMLQuantizationType.Q8_0)


def claim_all(path, *, is_packed=False):
    """Claim all weights that can be in a file; return the claims and their bytes."""
    infos = streamable(model_tensors(path))
    pattern = "|".join(map(re.escape, infos))
    packed = str(pack(path)) if is_packed else None
    n_bytes = sum(info.n_bytes for info in infos.values())
    return WeightClaim(pattern, source="file", path=packed), n_bytes


@pytest.mark.parametrize("weights", TYPES)
@pytest.mark.parametrize("name", ROWS)
def test_a_packed_model_is_what_llama_cpp_computes_by_default(family, name, weights):
    path = family(name, weights)
    claim, _ = claim_all(path, is_packed=True)
    assert np.array_equal(claimed(path, claim), vanilla_once(path))


@pytest.mark.slow
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
        weights.set_memory(n_bytes + COMPUTING, ARENA)
        evaluate(ctx)
        evaluate(ctx)
        before = weights.stats()
        evaluate(ctx)
        assert weights.stats() == before | {"passes": before["passes"] + 3}


def test_each_weight_is_read_once_a_batch_and_nothing_in_vain(model):
    claim, n_bytes = claim_all(model)
    plugin = Claimer(claim)
    with native(plugin=plugin), opened(model) as ctx:
        weights = plugin.contexts[0].file_weights()
        weights.set_memory(0, ARENA)
        evaluate(ctx)
        before = weights.stats()
        evaluate(ctx)  # three batches
        after = weights.stats()
        assert after["passes"] == before["passes"] + 3
        read = after["read_bytes"] - before["read_bytes"]
        # Whole pages are read, and more or less of the arena is read ahead when a batch ends.
        assert read == pytest.approx(3 * n_bytes, abs=0.02 * n_bytes + ARENA)
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


@pytest.mark.parametrize("n_calls", [0, 5, 40])
@pytest.mark.parametrize("name", ["llama", "llama-moe"])
def test_a_graph_that_is_stopped_leaves_nothing_wrong(family, name, n_calls):
    path, left = family(name, "F16"), [10**9]
    claim, n_bytes = claim_all(path, is_packed=True)
    expected = vanilla(path)

    @raw.ggml_abort_callback
    def abort(_user):
        left[0] -= 1
        return left[0] < 0

    plugin = Claimer(claim)
    with (
        native(plugin=plugin),
        loaded(path) as model,
        created(model, abort_callback=abort) as ctx,
    ):
        plugin.contexts[0].file_weights().set_memory(n_bytes // 3, ARENA)
        for _ in range(2):
            assert np.array_equal(evaluate(ctx), expected)
            left[0] = n_calls
            assert decode(ctx, range(25, 30), 37) == 2
            left[0] = 10**9


def test_a_part_of_a_packed_weight(family, tmp_path):
    path = family("llama", "Q4_0")
    expected = vanilla(zeroed(path, tmp_path / "zeroed.gguf", UP, rows=64))
    claim = WeightClaim(UP, source="file", path=str(pack(path)), rows=(60,))
    assert np.array_equal(claimed(path, claim), expected)


@pytest.mark.parametrize(
    ("name", "weights"), [pair for pair in CUT if pair[1] in {"Q4_0", "Q4_K", "F16"}]
)
def test_columns_of_a_packed_weight(family, name, weights):
    path = family(name, weights)
    pattern, n = columns_of(name, weights)
    part = WeightClaim(pattern, columns=(n,))
    claim, _ = claim_all(path, is_packed=True)
    assert np.array_equal(claimed(path, claim, part), claimed(path, part))


@pytest.fixture(scope="module")
def repacked_model(tmp_path_factory):
    path = tmp_path_factory.mktemp("wide") / "model.gguf"
    return write_random_model(path, SHAPE, GGMLQuantizationType.Q4_0)


PARTS = (
    WeightClaim(r"blk\.\d+\.(ffn_up|ffn_gate)\.weight", rows=(None, 4512, 1024)),
    WeightClaim(DOWN, columns=(None, 4512, 1024)),
    WeightClaim(r"blk\.\d+\.attn_output\.weight", columns=(None, 256, 64)),
)
"""At level 2, second pieces are not used at all."""


@contextlib.contextmanager
def levelled(path):
    """Open a context whose weights are in a packed file; also yield the size of all weights."""
    claim, n_bytes = claim_all(path, is_packed=True)
    plugin = Claimer(claim, *PARTS)
    with native(plugin=plugin), opened(path) as ctx:
        yield ctx, plugin.contexts[0], n_bytes


@pytest.mark.slow
def test_levels_of_packed_weights_change_between_batches(repacked_model):
    """Any weights may be in memory, and any may have been read ahead for another level."""
    expected, plugin = [], Claimer(*PARTS)
    with native(plugin=plugin), opened(repacked_model) as ctx:
        for level in range(3):
            plugin.contexts[0].level = level
            expected.append(evaluate(ctx))
    with levelled(repacked_model) as (ctx, context, n_bytes):
        for share in (0, 0.5, 1):
            context.file_weights().set_memory(int(share * n_bytes), ARENA)
            for level in (0, 1, 2, 2, 1, 0):
                context.level = level
                assert np.array_equal(evaluate(ctx), expected[level])


def test_what_is_read_follows_the_level(repacked_model):
    """First columns are read without the others, and useless read-ahead is counted.

    How much of the arena has been read ahead when a step ends is up to the disk.
    """
    n_steps = 8
    with levelled(repacked_model) as (ctx, context, n_bytes):
        weights, stats = context.file_weights(), []
        weights.set_memory(0, ARENA)
        for start, level in enumerate((0, 0, 2, *[2] * n_steps)):
            context.level = level
            step(ctx, [50], start)
            stats.append(weights.stats())
    _, before, changed, *_, after = stats
    assert before["wasted_bytes"] == 0
    assert 0 < changed["wasted_bytes"] == after["wasted_bytes"] <= ARENA
    infos = streamable(model_tensors(repacked_model))
    in_part = sum(info.n_bytes for name, info in infos.items() if "ffn_" in name)
    groups = SHAPE.n_layer * SHAPE.n_embd // 8  # of ffn_down; each group is read separately
    expected = n_bytes - in_part + in_part * 1024 / SHAPE.n_ff
    read = after["read_bytes"] - changed["read_bytes"]
    assert n_steps * expected - ARENA < read < n_steps * (expected + groups * 8192) + ARENA


def test_what_a_level_leaves_out_makes_way_for_what_it_needs(repacked_model):
    with levelled(repacked_model) as (ctx, context, n_bytes):
        weights = context.file_weights()
        weights.set_memory(int(0.9 * n_bytes), ARENA)

        def read(n_tokens):
            raw.llama_memory_clear(raw.llama_get_memory(ctx), True)
            before = weights.stats()["read_bytes"]
            for i in range(n_tokens):
                step(ctx, [50], i)
            return weights.stats()["read_bytes"] - before

        read(3)
        assert read(5) > 0
        context.level = 2
        read(70)
        assert read(5) == 0
        assert weights.stats()["kept_bytes"] <= 0.9 * n_bytes


def test_a_packed_file_of_another_model_is_refused(family, model):
    path = family("llama", "Q4_0")
    claim = WeightClaim(UP, source="file", path=str(pack(model)))
    with (
        pytest.raises((ConfigError, PluginError), match="does not belong to this model"),
        native(plugin=Claimer(claim)),
        opened(path),
    ):
        pass


# -- memory that graphs compute in ------------------------------------------------------------


@pytest.mark.slow
def test_what_batches_compute_in_makes_way_for_weights(model):
    """Batches take compute memory from kept weights, and single tokens give it back."""
    claim, n_bytes = claim_all(model)
    batches = [(range(5, 261), 0), ([40], 256), ([41], 257), (range(5, 205), 258), ([42], 458)]

    def logits(ctx):
        return [step(ctx, tokens, start) for tokens, start in batches]

    settings = {"n_ctx": 512, "n_batch": 256, "n_ubatch": 256}
    with loaded(model, use_extra_bufts=False) as llama, created(llama, **settings) as ctx:
        expected = logits(ctx)
    plugin, untouched, kept = Claimer(claim), [], []
    with (
        native(plugin=plugin),
        loaded(model, use_extra_bufts=False) as llama,
        created(llama, **settings) as ctx,
    ):
        (context,) = plugin.contexts
        weights = context.file_weights()
        step(ctx, [40], 0)
        weights.set_memory(n_bytes, ARENA)
        raw.llama_memory_clear(raw.llama_get_memory(ctx), True)
        for (tokens, start), before in zip(batches, expected, strict=True):
            assert np.array_equal(step(ctx, tokens, start), before)
            untouched.append(context.untouched_bytes())
            kept.append(weights.stats()["kept_bytes"])
    n_given = untouched[1] - untouched[0]
    assert n_given > 8 << 20
    assert untouched[2] == untouched[1] > untouched[3]
    assert n_bytes - n_given - (4 << 20) < kept[0] < n_bytes - n_given + (4 << 20)
    assert kept[2] > n_bytes - (4 << 20) > kept[3]


@pytest.mark.slow
def test_copies_of_attention_scores_make_way_too(tmp_path):
    """Without flash attention, ggml copies the scores of a batch as F16."""
    shape = Shape(n_layer=3, n_embd=256, n_head=16, n_head_kv=4, n_ff=9024, n_ctx=2048)
    path = write_random_model(tmp_path / "model.gguf", shape, GGMLQuantizationType.Q8_0)
    claim, n_bytes = claim_all(path)
    plugin, batch = Claimer(claim), range(300, 556)
    settings = {"n_ctx": 2048, "n_batch": 256, "n_ubatch": 256, "flash_attn_type": OFF}
    with (
        native(plugin=plugin),
        loaded(path, use_extra_bufts=False) as llama,
        created(llama, **settings) as ctx,
    ):
        (context,) = plugin.contexts
        weights = context.file_weights()
        step(ctx, batch, 0, n_outputs=1)
        weights.set_memory(n_bytes, 0)
        step(ctx, batch, 256, n_outputs=1)
        step(ctx, batch, 512, n_outputs=1)
        before = [context.untouched_bytes(), weights.stats()["kept_bytes"]]
        for start in range(768, 2048, 256):
            step(ctx, batch, start, n_outputs=1)
        after = [context.untouched_bytes(), weights.stats()["kept_bytes"]]
    touched, given = (a - b for a, b in zip(before, after, strict=True))
    assert touched > 2 * shape.n_head * (2048 - 768) * len(batch)
    assert given > touched - (4 << 20)  # whole pieces, and growth from 2 MiB on


# -- mixtures of experts ----------------------------------------------------------------------


@pytest.mark.parametrize("weights", ["F32", "F16"])
@pytest.mark.parametrize("name", ["llama-moe", "qwen3moe"])
def test_any_share_of_the_experts_may_be_in_memory(family, name, weights):
    path = family(name, weights)
    claim, n_bytes = claim_all(path, is_packed=True)
    expected, plugin = vanilla(path), Claimer(claim)
    with native(plugin=plugin), opened(path) as ctx:
        file_weights, kept = plugin.contexts[0].file_weights(), []
        least = file_weights.stats()["least_bytes"]
        assert least > 0
        for share in (0, 0.8, 1, 0.6, 0):
            file_weights.set_memory(int(share * n_bytes), ARENA)
            for _ in range(3):
                assert np.array_equal(evaluate(ctx), expected)
            kept.append(file_weights.stats()["kept_bytes"])
            assert kept[-1] <= max(share * n_bytes, least)
        assert kept[0] == kept[4] <= least
        assert kept[2] > kept[1] > kept[0]


def test_only_experts_that_are_chosen_are_read(family):
    path = family("llama-moe", "F16")
    claim, _ = claim_all(path, is_packed=True)
    plugin = Claimer(WeightClaim(r"blk\.\d+\.ffn_\w+_exps\.weight", source="file", path=claim.path))
    infos = [info for name, info in model_tensors(path).items() if "_exps" in name]
    (n_experts,) = {info.shape[2] for info in infos}
    of_a_token = sum(info.n_bytes for info in infos) * 2 // n_experts  # each token uses two experts
    with native(plugin=plugin), opened(path) as ctx:
        weights = plugin.contexts[0].file_weights()
        evaluate(ctx)
        before = weights.stats()
        step(ctx, [50], 37)
        after = weights.stats()
        assert after["read_bytes"] - before["read_bytes"] <= of_a_token
        n_used = sum(after[name] - before[name] for name in ("expert_hits", "expert_misses"))
        assert n_used == 2 * len(infos)
        weights.set_memory(sum(info.n_bytes for info in infos), 0)
        for _ in range(2):
            evaluate(ctx)
        before = weights.stats()
        evaluate(ctx)
        after = weights.stats()
        assert after["read_bytes"] == before["read_bytes"]
        assert after["expert_misses"] == before["expert_misses"]


def test_experts_that_cannot_be_read_fail_the_batch(family, tmp_path):
    path = family("llama-moe", "F16")
    packed = tmp_path / "model.packed"
    packed.write_bytes(pack(path).read_bytes())
    claim = WeightClaim(r"blk\.1\.ffn_down_exps\.weight", source="file", path=str(packed))
    expected = vanilla(path)
    with native(plugin=Claimer(claim)), opened(path) as ctx:
        with unreadable(packed):
            assert decode(ctx, range(10, 20), 0) != 0
        assert np.array_equal(evaluate(ctx), expected)

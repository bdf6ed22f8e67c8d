"""Sparse products: tokens read the channels that matter to them, from memory or from the file."""

from __future__ import annotations

import ctypes
import dataclasses
import re
import shutil

import llama_cpp
import numpy as np
import pytest
from claiming import Claimer, created, decode, evaluate, loaded, native, opened, step, vanilla
from gguf import GGMLQuantizationType
from masked_llama import MaskedLlama
from packed_models import pack
from unreadable import unreadable

from llmaas_hooks import (
    ChannelColumns,
    ChannelOperand,
    ConfigError,
    FileStamp,
    StoreError,
    WeightClaim,
)
from llmaas_patches.native.packing import model_tensors
from llmaas_plugins.flash_weights.calibration import Activity
from llmaas_plugins.flash_weights.channel_layout import channel_operands
from llmaas_plugins.flash_weights.channels import (
    SPARSITIES,
    open_channels,
    open_scales,
    write_channels,
)
from llmaas_plugins.flash_weights.operands import FAMILIES
from llmaas_plugins.flash_weights.packed import streamable

ARENA = 8 << 20
TOKENS = [1, 400, 401, 402, 403, 404, 300, 200, 100, 50, 60, 70, 80]


@pytest.fixture(scope="module")
def channels(reference_model, tmp_path_factory):
    """Return the reference model's channel file, by layers in a group; each is written once."""
    folder = tmp_path_factory.mktemp("channels")

    def find(group_layers):
        path, tensors = folder / f"{group_layers}.channels", model_tensors(reference_model)
        if not path.exists():
            calibration = _calibration(tensors)
            list(
                write_channels(
                    reference_model, path, tensors, calibration, group_layers=group_layers
                )
            )
        return open_channels(path, reference_model, tensors)

    return find


@pytest.fixture(scope="module")
def q4_k_m(reference_model, tmp_path_factory):
    """Return the reference model in Q4_K_M, the usual quantization, with a channel file."""
    path = tmp_path_factory.mktemp("q4_k_m") / "model.gguf"
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M, True
    quantized = llama_cpp.llama_model_quantize(
        bytes(reference_model), bytes(path), ctypes.byref(params)
    )
    assert quantized == 0
    tensors, file = model_tensors(path), path.with_suffix(".channels")
    list(write_channels(path, file, tensors, _calibration(tensors)))
    return path, open_channels(file, path, tensors)


def _calibration(tensors):
    """Return a calibration with thresholds that are never reached, and random channel orders."""
    rng = np.random.default_rng(5)
    quantiles = np.linspace(1, 2, len(SPARSITIES), dtype=np.float32)
    return {
        operand: Activity(quantiles, rng.random(operand.n_channels, np.float32))
        for operand in channel_operands(tensors)
    }


def operands(file, *, threshold=None, share=None, by_layer=False, cache="recent"):
    """Return a channel file's operands; a threshold or a share selects the values that are used."""
    with open_scales(file) as read_scales:
        for number, found in enumerate(file.operands.values()):
            yield ChannelOperand(
                pool=number if by_layer else list(FAMILIES).index(found.operand.family),
                n_bytes=found.n_bytes,
                offset=found.first,
                stride=found.stride,
                order=found.order.astype(np.uint32),
                cache=cache,
                threshold=threshold or 0.0,
                n_top=round(share * found.operand.n_channels) if share is not None else 0,
                columns=tuple(
                    ChannelColumns(piece.name, piece.n_bits, piece.offset, *read_scales(piece))
                    for piece in found.pieces
                ),
            )


def claim_all(path):
    """Claim the matrices that graphs multiply with."""
    names = [name for name in streamable(model_tensors(path)) if name != "token_embd.weight"]
    return WeightClaim("|".join(map(re.escape, names)), source="file")


def at(file):
    return str(file.path), file.stamp


def attach(plugin, file, kept=1 << 30, **selection):
    for context in plugin.contexts:
        context.sparse_tokens = True
    weights = plugin.contexts[0].file_weights()
    for operand in operands(file, **selection):
        weights.add_operand(*at(file), operand)
    weights.set_memory(kept, ARENA)
    return weights


def one_by_one(ctx, tokens=TOKENS, start=0):
    return np.concatenate([step(ctx, [token], start + i) for i, token in enumerate(tokens)])


def sparse(path, file, kept=1 << 30, **selection):
    """Return the logits of tokens that are evaluated one by one with sparse products."""
    plugin = Claimer(claim_all(path))
    with native(plugin=plugin), opened(path, use_extra_bufts=False) as ctx:
        attach(plugin, file, kept, **selection)
        return one_by_one(ctx)


def divergence(expected, found):
    """Return the mean Kullback-Leibler divergence of next-token distributions, in nats."""
    p, q = (x - np.logaddexp.reduce(x, axis=-1, keepdims=True) for x in (expected, found))
    return float((np.exp(p) * (p - q)).sum(-1).mean())


def largest(share):
    """Return a mask function that keeps the largest values of each activation."""

    def masked(_layer, _family, x):
        n = round(share * x.shape[-1])
        order = np.argsort(-np.abs(x), axis=-1, kind="stable")[:, :n]
        kept = np.zeros_like(x)
        np.put_along_axis(kept, order, np.take_along_axis(x, order, -1), -1)
        return kept

    return masked


@pytest.mark.parametrize("share", [1, 0.7, 0.5])
def test_the_largest_values_are_what_an_independent_model_masks(reference_model, channels, share):
    model = MaskedLlama(reference_model)
    dense, expected = (model.logits(TOKENS, largest(of)) for of in (1, share))
    found = sparse(reference_model, channels(1), share=share)
    assert divergence(expected, found) < 0.03
    assert share == 1 or divergence(dense, found) > 5 * divergence(expected, found)


def test_a_model_of_q4_k_and_q6_k(q4_k_m):
    path, file = q4_k_m
    model = MaskedLlama(path)
    for share, most in ((1, 0.001), (0.5, 0.03)):
        expected = model.logits(TOKENS, largest(share))
        assert divergence(expected, sparse(path, file, share=share)) < most


def test_four_bits_stay_four_bits(q4_k_m):
    path, file = q4_k_m
    tensors = model_tensors(path)
    pieces = [piece for channels in file.operands.values() for piece in channels.pieces]
    by_type = {(tensors[piece.name].type, piece.n_bits) for piece in pieces}
    assert by_type == {(GGMLQuantizationType.Q4_K, 4), (GGMLQuantizationType.Q6_K, 8)}
    n_bytes = sum(tensors[piece.name].n_bytes for piece in pieces)
    assert file.path.stat().st_size < 1.25 * n_bytes


@pytest.mark.parametrize("threshold", [0.1, 0.3])
def test_values_from_a_threshold_on(reference_model, channels, threshold):
    model = MaskedLlama(reference_model)
    dense = model.logits(TOKENS, lambda _layer, _family, x: x)
    expected = model.logits(TOKENS, lambda _l, _f, x: np.where(np.abs(x) >= threshold, x, 0))
    found = sparse(reference_model, channels(1), threshold=threshold)
    assert divergence(expected, found) < 0.03
    assert divergence(dense, found) > 3 * divergence(expected, found)


CACHES = {
    "shared": {},
    "by layer": {"by_layer": True},
    "busiest": {"cache": "busiest"},
    "streamed": {"cache": "streamed"},
}


@pytest.mark.parametrize(
    ("group_layers", "cache"),
    [(1, cache) for cache in CACHES] + [(3, "shared"), (3, "busiest")],
)
def test_where_channels_are_does_not_matter(reference_model, channels, group_layers, cache):
    expected = sparse(reference_model, channels(1), share=0.5)
    for kept in (0, 3 << 20):
        found = sparse(reference_model, channels(group_layers), kept, share=0.5, **CACHES[cache])
        assert np.array_equal(found, expected)


def test_the_first_channels_of_the_file_stay(reference_model, channels):
    """Once the first channels are kept, others are read and forgotten again and again."""
    plugin = Claimer(claim_all(reference_model))
    with native(plugin=plugin), opened(reference_model) as ctx:
        weights, reads = attach(plugin, channels(1), 3 << 20, share=1, cache="busiest"), []
        for i in range(6):
            before = weights.stats()["channel_hits"]
            step(ctx, [TOKENS[i]], i)
            reads.append(weights.stats()["channel_hits"] - before)
        assert reads[0] == 0
        assert len(set(reads[2:])) == 1
        n_channels = 8 * (3 * 256 + 768)
        assert reads[-1] == pytest.approx(n_channels / 2, rel=0.1)


def test_memory_may_change_between_tokens(reference_model, channels):
    expected = sparse(reference_model, channels(1), share=0.5)
    plugin = Claimer(claim_all(reference_model))
    with native(plugin=plugin), opened(reference_model, use_extra_bufts=False) as ctx:
        weights, rows = attach(plugin, channels(1), share=0.5), []
        for i, token in enumerate(TOKENS):
            kept = (i * 7919) % 13 * (1 << 19)
            weights.set_memory(kept, ARENA)
            rows.append(step(ctx, [token], i))
            assert weights.stats()["kept_bytes"] <= kept
        assert np.array_equal(np.concatenate(rows), expected)


@pytest.mark.parametrize("cache", ["recent", "streamed"])
def test_reads_may_change_between_tokens(reference_model, channels, cache):
    expected = sparse(reference_model, channels(1), share=0.5)
    plugin, gaps = Claimer(claim_all(reference_model)), (None, 0, 1 << 20)
    with native(plugin=plugin), opened(reference_model, use_extra_bufts=False) as ctx:
        weights, rows = attach(plugin, channels(1), 1 << 20, share=0.5, cache=cache), []
        for i, token in enumerate(TOKENS):
            weights.set_reading(
                queue_depth=(i * 97) % 257, read_size=4096 << i, read_gap=gaps[i % 3]
            )
            rows.append(step(ctx, [token], i))
        assert np.array_equal(np.concatenate(rows), expected)


@pytest.mark.parametrize(
    "wrong", [{"queue_depth": 257}, {"read_size": 5000}, {"read_size": 32 << 20}], ids=str
)
def test_reads_that_are_not_possible(reference_model, wrong):
    plugin = Claimer(claim_all(reference_model))
    with (
        native(plugin=plugin),
        opened(reference_model),
        pytest.raises(ValueError, match="not possible"),
    ):
        plugin.contexts[0].file_weights().set_reading(**wrong)


def test_several_threads_make_no_difference(reference_model, channels):
    expected = sparse(reference_model, channels(1), share=0.5)
    plugin = Claimer(claim_all(reference_model))
    with (
        native(plugin=plugin),
        loaded(reference_model, use_extra_bufts=False) as model,
        created(model, n_threads=3, n_threads_batch=3) as ctx,
    ):
        attach(plugin, channels(1), 1 << 20, share=0.5)
        found = one_by_one(ctx)
    assert divergence(expected, found) < 1e-9  # attention is split differently


def test_prompts_are_dense(reference_model, channels):
    expected = vanilla(reference_model, use_extra_bufts=False)
    plugin = Claimer(claim_all(reference_model))
    with native(plugin=plugin), opened(reference_model, use_extra_bufts=False) as ctx:
        attach(plugin, channels(1), share=0.5)
        found = evaluate(ctx)  # 35 tokens, then two single ones
    assert np.array_equal(found[:35], expected[:35])
    assert not np.array_equal(found[35:], expected[35:])


@pytest.mark.parametrize("n_tokens", [1, 2, 13])
def test_tokens_are_sparse_only_when_that_is_switched_on(reference_model, channels, n_tokens):
    """Only one row of logits is requested, so the last layer's block has one row in any batch."""
    with opened(reference_model, use_extra_bufts=False) as ctx:
        stock = step(ctx, TOKENS[:n_tokens], 0, n_outputs=1)
    plugin, rows = Claimer(claim_all(reference_model)), []
    with native(plugin=plugin), opened(reference_model, use_extra_bufts=False) as ctx:
        attach(plugin, channels(1), share=0.5)
        for is_sparse in (False, True):
            plugin.contexts[0].sparse_tokens = is_sparse
            llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(ctx), True)
            rows.append(step(ctx, TOKENS[:n_tokens], 0, n_outputs=1))
    exact, switched = rows
    assert np.array_equal(exact, stock)
    assert np.array_equal(switched, stock) == (n_tokens > 1)


@pytest.mark.parametrize("cache", ["recent", "streamed"])
def test_parts_of_weights_with_channels_are_dense(reference_model, channels, cache):
    parts = (
        WeightClaim(r"blk\.\d+\.ffn_(gate|up)\.weight", rows=(None, 256)),
        WeightClaim(r"blk\.\d+\.ffn_down\.weight", columns=(None, 256)),
    )
    file, results = channels(1), []
    of_the_block = [one for one in operands(file, share=0.5, cache=cache) if _is_of_ffn(one)]
    for used in ([], of_the_block):
        plugin = Claimer(claim_all(reference_model), *parts)
        with native(plugin=plugin), opened(reference_model, use_extra_bufts=False) as ctx:
            (context,) = plugin.contexts
            context.sparse_tokens = True
            weights = context.file_weights()
            for operand in used:
                weights.add_operand(*at(file), operand)
            weights.set_memory(3 << 20, ARENA)
            for level in (0, 1, 0, 1):
                context.level = level
                llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(ctx), True)
                results.append(one_by_one(ctx))
    dense, part, _, _, sparse_first, *others = results
    assert all(np.array_equal(other, part) for other in others[::2])
    assert np.array_equal(others[1], sparse_first)
    assert divergence(dense, sparse_first) > 0.01


def _is_of_ffn(operand):
    return "ffn" in operand.columns[0].weight


def test_nothing_is_read_once_all_channels_are_in_memory(reference_model, channels):
    plugin = Claimer(claim_all(reference_model))
    with native(plugin=plugin), opened(reference_model) as ctx:
        weights = attach(plugin, channels(1), share=1)
        assert weights.stats()["passing_bytes"] > 0
        one_by_one(ctx, TOKENS[:2])
        before = weights.stats()
        assert before["kept_bytes"] == before["bytes"]
        step(ctx, [5], 2)
        after = weights.stats()
        assert after["read_bytes"] == before["read_bytes"]
        assert after["channel_misses"] == before["channel_misses"]
        assert after["channel_hits"] > before["channel_hits"]


def test_hot_channels_stay(reference_model, channels):
    """With memory for half of the channels, more than half of the used channels are in memory."""
    plugin = Claimer(claim_all(reference_model))
    with native(plugin=plugin), opened(reference_model) as ctx:
        weights = attach(plugin, channels(1), 3 << 20, share=0.3)
        one_by_one(ctx, [TOKENS[i % 13] for i in range(60)])
        before = weights.stats()
        one_by_one(ctx, TOKENS, 60)
        after = weights.stats()
        hits, misses = (after[name] - before[name] for name in ("channel_hits", "channel_misses"))
        assert hits > 1.5 * misses


def test_contexts_of_a_model_share_its_channels(reference_model, channels):
    expected = sparse(reference_model, channels(1), share=0.5)
    plugin = Claimer(claim_all(reference_model))
    with (
        native(plugin=plugin),
        loaded(reference_model, use_extra_bufts=False) as model,
        created(model) as one,
        created(model) as two,
    ):
        attach(plugin, channels(1), 2 << 20, share=0.5)
        for i, token in enumerate(TOKENS):
            for ctx in (one, two):
                assert np.array_equal(step(ctx, [token], i)[0], expected[i])


def test_channels_that_cannot_be_read_fail_the_batch(reference_model, channels, tmp_path):
    file, path = channels(1), tmp_path / "cut.channels"
    path.write_bytes(file.path.read_bytes())
    expected = sparse(reference_model, file, share=0.5)
    plugin = Claimer(claim_all(reference_model))
    with native(plugin=plugin), opened(reference_model, use_extra_bufts=False) as ctx:
        attach(plugin, file._replace(path=path, stamp=FileStamp.at(path)), 2 << 20, share=0.5)
        with unreadable(path):
            assert decode(ctx, [1], 0) != 0
        assert np.array_equal(one_by_one(ctx), expected)


WRONG = {
    "streamed, and not side by side": {"cache": "streamed", "stride": 4096},
    "an order that is none": {"order": np.zeros(256, np.uint32)},
    "too many at the top": {"n_top": 257},
    "a negative threshold": {"threshold": -1.0},
    "channels that overlap": {"stride": 1},
    "no whole blocks": {"order": np.arange(250, dtype=np.uint32)},
    "a predictor that is not there": {"predictor": 0},
    "columns behind the channel": {"n_bytes": 300, "stride": 300},
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_operands_that_contradict_themselves_are_refused(reference_model, channels, wrong):
    operand = dataclasses.replace(next(operands(channels(1), share=0.5)), **wrong)
    plugin = Claimer(claim_all(reference_model))
    with native(plugin=plugin), opened(reference_model):
        weights = plugin.contexts[0].file_weights()
        with pytest.raises(ConfigError, match="does not match this model"):
            weights.add_operand(*at(channels(1)), operand)


def test_a_weight_has_one_operand(reference_model, channels):
    operand = next(operands(channels(1), share=0.5))
    plugin = Claimer(claim_all(reference_model))
    with native(plugin=plugin), opened(reference_model):
        weights = plugin.contexts[0].file_weights()
        weights.add_operand(*at(channels(1)), operand)
        with pytest.raises(ConfigError, match="has another shape"):
            weights.add_operand(*at(channels(1)), operand)
        with pytest.raises(OSError, match="cannot be used"):
            weights.add_operand("/nowhere/model.channels", channels(1).stamp, operand)


def test_a_file_that_was_replaced_is_not_read(reference_model, channels, tmp_path):
    """The file that the engine opens must be the one that was checked."""
    file = channels(1)
    operand, path = next(operands(file, share=0.5)), str(tmp_path / "its.channels")
    plugin = Claimer(claim_all(reference_model))
    with native(plugin=plugin), opened(reference_model):
        weights = plugin.contexts[0].file_weights()
        shutil.copy(file.path, path)
        checked = FileStamp.at(path)
        shutil.copy(file.path, tmp_path / "other")
        (tmp_path / "other").replace(path)
        with pytest.raises(StoreError, match="was replaced or changed while it was opened"):
            weights.add_operand(path, checked, operand)
        assert weights.stats()["operands"] == 0
        weights.add_operand(path, FileStamp.at(path), operand)
        assert weights.stats()["operands"] == 1
        with pytest.raises(StoreError, match="was replaced or changed while it was opened"):
            weights.add_operand(path, checked, operand)


WRONG_SCALES = {
    "of other rows": {"mins": np.zeros((8, 128), np.float16)},
    "of other channels": {"scales": np.zeros((7, 256), np.float16)},
    "with 8 bits": {"mins": np.zeros((8, 256), np.float16)},
}


@pytest.mark.parametrize("wrong", WRONG_SCALES.values(), ids=WRONG_SCALES)
def test_scales_that_do_not_go_with_their_columns_are_refused(reference_model, channels, wrong):
    operand = next(operands(channels(1), share=0.5))
    columns = dataclasses.replace(operand.columns[0], **wrong)
    plugin = Claimer(claim_all(reference_model))
    with native(plugin=plugin), opened(reference_model):
        weights = plugin.contexts[0].file_weights()
        with pytest.raises(ConfigError, match="has another shape"):
            weights.add_operand(*at(channels(1)), dataclasses.replace(operand, columns=(columns,)))


@pytest.mark.parametrize("cache", ["recent", "busiest", "streamed"])
def test_experts_and_channels_share_the_memory(family, tmp_path, cache):
    path, file = family("llama-moe", "F16"), tmp_path / "model.channels"
    tensors = model_tensors(path)
    list(write_channels(path, file, tensors, _calibration(tensors)))
    found = []
    for share in (1, 0.6, 0.3):
        claim = dataclasses.replace(claim_all(path), path=str(pack(path)))
        plugin = Claimer(claim)
        with native(plugin=plugin), opened(path) as ctx:
            weights = attach(plugin, open_channels(file, path, tensors), share=0.5, cache=cache)
            stats = weights.stats()
            assert stats["least_bytes"] > 0
            assert stats["operands"] > 0
            kept = int(share * stats["bytes"])
            weights.set_memory(kept, ARENA)
            weights.set_reading(queue_depth=5, read_size=8192 if share < 0.5 else 0)
            found.append(one_by_one(ctx, range(5, 25)))
            assert weights.stats()["kept_bytes"] <= max(kept, stats["least_bytes"])
    assert np.array_equal(found[0], found[1])
    assert np.array_equal(found[0], found[2])

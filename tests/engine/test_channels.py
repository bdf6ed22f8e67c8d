"""Sparse products: tokens read the channels that matter to them, and other claims are refused."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import shutil

import llama_cpp
import numpy as np
import pytest
from channel_claims import (
    ARENA,
    TOKENS,
    at,
    attach,
    calibrated,
    claim_all,
    divergence,
    one_by_one,
    operands,
    sparse,
)
from claiming import Claimer, created, evaluate, loaded, native, opened, step, vanilla
from gguf import GGMLQuantizationType
from masked_llama import MaskedLlama

from llmaas_hooks import (
    ConfigError,
    FileStamp,
    StoreError,
    WeightClaim,
)
from llmaas_patches.native.packing import model_tensors
from llmaas_plugins.flash_weights.channels import (
    open_channels,
    write_channels,
)


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
    list(write_channels(path, file, tensors, calibrated(tensors)))
    return path, open_channels(file, path, tensors)


@pytest.fixture(scope="module")
def masked(reference_model):
    """Return a function to the independent model's logits by how its activations are masked."""
    model = MaskedLlama(reference_model)
    return functools.cache(lambda how, amount: model.logits(TOKENS, how(amount)))


@pytest.fixture(scope="module")
def sparse_logits(reference_model, channels):
    """Return a function to the logits with a share of the channels."""
    return functools.cache(lambda share: sparse(reference_model, channels(1), share=share))


def largest(share):
    """Return a mask function that keeps the largest values of each activation."""

    def masked(_layer, _family, x):
        n = round(share * x.shape[-1])
        order = np.argsort(-np.abs(x), axis=-1, kind="stable")[:, :n]
        kept = np.zeros_like(x)
        np.put_along_axis(kept, order, np.take_along_axis(x, order, -1), -1)
        return kept

    return masked


def from_a_threshold_on(threshold):
    """Return a mask function that keeps the values of this magnitude or a larger one."""
    return lambda _layer, _family, x: np.where(np.abs(x) >= threshold, x, 0)


@pytest.mark.parametrize("share", [1, 0.7, 0.5])
def test_the_largest_values_are_what_an_independent_model_masks(masked, sparse_logits, share):
    dense, expected = masked(largest, 1), masked(largest, share)
    found = sparse_logits(share)
    assert divergence(expected, found) < 0.03
    assert share == 1 or divergence(dense, found) > 5 * divergence(expected, found)


@pytest.mark.slow
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
def test_values_from_a_threshold_on(reference_model, channels, masked, threshold):
    dense, expected = masked(largest, 1), masked(from_a_threshold_on, threshold)
    found = sparse(reference_model, channels(1), threshold=threshold)
    assert divergence(expected, found) < 0.03
    assert divergence(dense, found) > 3 * divergence(expected, found)


def test_several_threads_make_no_difference(reference_model, channels, sparse_logits):
    expected = sparse_logits(0.5)
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

"""Where channels are, in memory or in the file, and when; tokens do not notice."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from channel_claims import (
    ARENA,
    TOKENS,
    attach,
    calibrated,
    claim_all,
    one_by_one,
    sparse,
)
from claiming import Claimer, created, decode, loaded, native, opened, step
from llama_cpp import llama_cpp
from packed_models import pack
from unreadable import unreadable

from llmaas_hooks import (
    FileStamp,
    WeightClaim,
)
from llmaas_patches.native.packing import model_tensors
from llmaas_plugins.flash_weights.channels import (
    open_channels,
    write_channels,
)

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


@pytest.mark.parametrize("cache", CACHES)
def test_prompts_keep_their_weights_in_memory_that_channels_leave(reference_model, channels, cache):
    expected = sparse(reference_model, channels(1), share=0.5)
    plugin, rows = Claimer(claim_all(reference_model)), []

    def prompt(ctx):
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(ctx), True)
        rows.append(step(ctx, TOKENS, 0)[-1])
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(ctx), True)

    with native(plugin=plugin), opened(reference_model, use_extra_bufts=False) as ctx:
        weights = attach(plugin, channels(1), share=0.5, **CACHES[cache])
        before = weights.stats()
        n_bytes, prompts = before["bytes"], before["prompt_bytes"]
        assert (prompts > 4 << 20, before["prompt_kept_bytes"], before["prompt_used_bytes"]) == (
            True, 0, 0,
        )  # fmt: skip
        for room, least, most in ((prompts, 1, 1), (prompts // 2, 0.2, 0.5), (0, 0, 0)):
            weights.set_memory(n_bytes + room, ARENA)
            prompt(ctx)
            assert np.array_equal(one_by_one(ctx), expected)
            reads = weights.stats()["read_bytes"]
            prompt(ctx)
            after = weights.stats()
            share = after["prompt_kept_bytes"] / prompts
            assert least <= share <= most
            assert after["read_bytes"] - reads == pytest.approx((1 - share) * prompts, rel=0.1)
        assert after["prompt_used_bytes"] == 6 * prompts
    assert all(np.array_equal(row, rows[0]) for row in rows)


def test_tokens_at_a_narrow_level_use_a_part_of_the_weights_of_prompts(reference_model, channels):
    narrow = (
        WeightClaim(r"blk\.\d+\.ffn_(gate|up)\.weight", rows=(None, 256)),
        WeightClaim(r"blk\.\d+\.ffn_down\.weight", columns=(None, 256)),
    )
    plugin = Claimer(claim_all(reference_model), *narrow)
    with native(plugin=plugin), opened(reference_model, use_extra_bufts=False) as ctx:
        weights = attach(plugin, channels(1), share=0.5)
        used = []
        for start, level, tokens in ((0, 0, TOKENS), (13, 0, [5]), (14, 1, [6])):
            plugin.contexts[0].level = level
            before = weights.stats()["prompt_used_bytes"]
            step(ctx, tokens, start)
            used.append(weights.stats()["prompt_used_bytes"] - before)
        prompt, token, narrow_token = used
        assert (prompt, token) == (weights.stats()["prompt_bytes"], 0)
        assert 0 < narrow_token < prompt / 2


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


@pytest.mark.parametrize("cache", ["recent", "busiest", "streamed"])
def test_experts_and_channels_share_the_memory(family, tmp_path, cache):
    path, file = family("llama-moe", "F16"), tmp_path / "model.channels"
    tensors = model_tensors(path)
    list(write_channels(path, file, tensors, calibrated(tensors)))
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

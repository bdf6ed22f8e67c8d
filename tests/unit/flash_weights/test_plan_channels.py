"""Plans with preloading and of ActiveFlow's pipeline, from how channels are used."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from flash_models import N_FF, WIDTH, tensors_of, write_model
from gguf import GGMLQuantizationType
from plan_sizes import FIXED, IN_CHANNELS, MACHINE, MIB, PARTS, SIZES, channels, plan, sparse

from llmaas_plugins.flash_weights import engine_modes
from llmaas_plugins.flash_weights.channel_use import SIMILARITY, ChannelUse, assumed_foreseen
from llmaas_plugins.flash_weights.cost_model import pipeline_cost
from llmaas_plugins.flash_weights.locality import typical_means
from llmaas_plugins.flash_weights.model_sizes import Metadata, sizes_of
from llmaas_plugins.flash_weights.pipeline import hit_rate, similarity, system_of
from llmaas_plugins.flash_weights.shares import SPARSITIES

# -- ActiveFlow ----------------------------------------------------------------------------------


def test_the_symbols_of_a_model():
    system = system_of(SIZES, MACHINE, 377 * MIB, 0.5)
    assert system.s_m == IN_CHANNELS
    assert system.m_kv == FIXED + (32 + 58 + 8) * MIB
    weights = [part.all_bytes / IN_CHANNELS for part in PARTS]
    assert system.si == pytest.approx(sum(
        weight * SIMILARITY[part.family] for weight, part in zip(weights, PARTS, strict=True)
    ))  # fmt: skip
    one = channels("ffn_up", 2048, 8192)
    alone = system_of(dataclasses.replace(SIZES, channels=(one,)), MACHINE, 377 * MIB, 0.5)
    for n in (1, 4):
        assert alone.bw_flash(n) == pytest.approx(n * 8192 / (8e-6 + n * 8192 / 1.5e9))
    assert alone.si == pytest.approx(SIMILARITY["ffn_up"])


def test_the_pipeline_is_the_paper():
    found = plan(700, 0.5)
    system = system_of(SIZES, MACHINE, 700 * MIB, 0.5)
    assert [row.group_layers for row in found.pipeline] == [cost.n for cost in found.search.tried]
    for row, cost in zip(found.pipeline, found.search.tried, strict=True):
        assert cost == pipeline_cost(system, 0.5, cost.n)
        others_s = (8 + 58) * MIB / 10e9
        assert row.token_s == pytest.approx(cost.t_decode + others_s)
        assert row.cache == min(int(cost.m_cache), IN_CHANNELS)
        assert row.least_budget == pytest.approx(700 * MIB - cost.m_cache, abs=2)
        missed = IN_CHANNELS / 2 * (1 - cost.hr)
        assert row.read == pytest.approx(missed * (1 + (1 - system.si) / cost.n))


@pytest.mark.parametrize(("budget_mib", "expected"), [(300, None), (600, 0.0)])
def test_its_sparsity(budget_mib, expected):
    found = plan(budget_mib, None)
    expected = 1 - budget_mib * MIB / IN_CHANNELS if expected is None else expected
    assert found.sparsity == pytest.approx(expected)
    assert all(row.sparsity == found.sparsity for row in found.sparse)


def test_its_sparsity_has_a_limit():
    large = [dataclasses.replace(part, n_layers=20 * part.n_layers) for part in PARTS]
    assert plan(220, None, sizes=dataclasses.replace(SIZES, channels=tuple(large))).sparsity == 0.95


def with_parts(**changes):
    return dataclasses.replace(
        SIZES, channels=tuple(dataclasses.replace(part, **changes) for part in PARTS)
    )


def test_what_was_measured_is_taken():
    alike, usual = plan(400, sizes=with_parts(foreseen=np.ones(19))), plan(400)
    assert (alike.search.tried[0].t_onload, usual.search.tried[0].t_onload > 0) == (0, True)
    assert usual.search.tried[0].hr == alike.search.tried[0].hr
    flat = [dataclasses.replace(part, means=np.ones(part.n_channels)) for part in PARTS]
    same = dataclasses.replace(SIZES, channels=tuple(flat))
    assert plan(400, sizes=same).search.tried[0].hr < usual.search.tried[0].hr
    assert hit_rate(same, 0.3, 0.5) == pytest.approx(0.3, abs=0.01)
    assert hit_rate(SIZES, 0.3, 0.5) > 0.34
    assert hit_rate(SIZES, 1, 0.5) == pytest.approx(1)


def test_each_family_leaves_out_its_own_share():
    shares = {"attn_qkv": 0.2, "attn_output": 0.3, "ffn_up": 0.4, "ffn_down": 0.9}
    own = [
        dataclasses.replace(part, shares=np.full(19, shares[part.family], np.float32))
        for part in PARTS
    ]
    found = hit_rate(dataclasses.replace(SIZES, channels=tuple(own)), 0.3, 0.5)
    alone = [dataclasses.replace(SIZES, channels=(part,)) for part in PARTS]
    rates = [hit_rate(one, 0.3, shares[one.channels[0].family]) for one in alone]
    used = [part.all_bytes * (1 - shares[part.family]) for part in PARTS]
    assert found == pytest.approx(np.average(rates, weights=used), rel=1e-3)
    assert found != pytest.approx(hit_rate(SIZES, 0.3, 0.5), rel=1e-2)


def test_similarity_depends_on_the_sparsity():
    rising = with_parts(foreseen=np.array(SPARSITIES))
    assert [similarity(rising, each) for each in (0.25, 0.9)] == pytest.approx([0.25, 0.9])
    assert similarity(rising, 0) == 1
    chance = assumed_foreseen("ffn_down")
    np.testing.assert_allclose(chance, 1 - np.array(SPARSITIES), rtol=1e-6)
    assert (assumed_foreseen("ffn_up") > chance).all()


def test_how_channels_are_used_comes_from_the_channel_file(tmp_path):
    tensors = tensors_of(write_model(tmp_path / "m.gguf", GGMLQuantizationType.Q4_0, 2))
    falling, half = np.linspace(2, 0, 33, dtype=np.float32), np.full(19, 0.5, np.float32)
    share = np.linspace(0.1, 0.9, 19, dtype=np.float32)
    uses = {"ffn_up": ChannelUse(falling, share, half), "ffn_down": ChannelUse(None, share, None)}
    found = {one.family: one for one in sizes_of(tensors, Metadata(4, 1.0), 64, uses=uses).channels}
    up, down, qkv = found["ffn_up"], found["ffn_down"], found["attn_qkv"]
    np.testing.assert_allclose(
        up.means,
        2
        - 2 * (np.clip((np.arange(WIDTH) + 0.5) / WIDTH, 0.5 / 33, 32.5 / 33) - 0.5 / 33) * 33 / 32,
    )
    assert up.left_out(0.05) == pytest.approx(0.1)
    assert (up.foreseen_at(0.7), up.foreseen_at(0)) == (0.5, 1)
    np.testing.assert_array_equal(down.means, typical_means("ffn_down", N_FF))
    assert down.left_out(0.05) == pytest.approx(0.1)
    np.testing.assert_array_equal(down.foreseen, assumed_foreseen("ffn_down"))
    assert qkv.left_out(0.5) == pytest.approx(0.5)


# -- preloading ----------------------------------------------------------------------------------


def test_preloading_hides_reads_behind_computing():
    slow = dataclasses.replace(MACHINE, bytes_per_s=2e9)
    on_demand, ahead = (sparse(377, machine=slow, preload=each) for each in (False, True))
    assert (on_demand.preload, ahead.preload) == (False, True)
    assert ahead.least_budget == on_demand.least_budget + 32 * MIB
    assert on_demand.cache - ahead.cache == 32 * MIB
    computing_s = (8 * MIB + 58 * MIB + IN_CHANNELS / 2) / 2e9
    use = engine_modes._Use(SIZES, (ahead.cache - SIZES.dense) / IN_CHANNELS, 0.5, "shared", 12_000)
    reads, before = use.reads_ahead(), use.reads()
    done = computing_s / (reads.n_reads * 8e-6 + reads.n_bytes / 1.5e9)
    assert 0.2 < done < 1
    late = use.reads(done)
    assert before.n_bytes > late.n_bytes > (1 - done) * before.n_bytes
    waiting_s = late.n_reads * 8e-6 + late.n_bytes / 1.5e9
    assert ahead.token_s == pytest.approx(waiting_s + computing_s)
    assert ahead.read == pytest.approx(late.n_bytes + done * reads.n_bytes)
    assert ahead.token_s < on_demand.token_s
    assert ahead.read > on_demand.read


def test_preloading_of_what_is_foreseen_always_leaves_no_waits():
    foreseen, slow = with_parts(foreseen=np.ones(19)), dataclasses.replace(MACHINE, bytes_per_s=1e8)
    found = sparse(377, sizes=foreseen, machine=slow, preload=True)
    assert found.token_s == pytest.approx((8 * MIB + 58 * MIB + IN_CHANNELS / 2) / 1e8)
    never = with_parts(foreseen=np.zeros(19))
    on_demand = sparse(409, sizes=never, machine=slow)
    in_vain = sparse(441, sizes=never, machine=slow, preload=True)
    assert in_vain.token_s == pytest.approx(on_demand.token_s)
    assert in_vain.read > 1.9 * on_demand.read - MIB


def test_groups_read_ahead_records_of_several_layers():
    grouped = tuple(dataclasses.replace(part, stride=4 * part.n_bytes) for part in PARTS)
    sizes = dataclasses.replace(SIZES, channels=grouped)
    alone, four = (
        engine_modes._Use(each, 0.3, 0.5, "shared", 0).reads_ahead() for each in (SIZES, sizes)
    )
    assert four.n_reads < alone.n_reads / 3
    assert 0.4 * alone.n_bytes < four.n_bytes < 12 / 15 * alone.n_bytes  # fewer parts of pages
    whole = dataclasses.replace(
        SIZES, channels=tuple(dataclasses.replace(part, stride=16 * part.n_bytes) for part in PARTS)
    )
    assert engine_modes._Use(whole, 0.3, 0.5, "shared", 0).reads_ahead().n_reads == 0

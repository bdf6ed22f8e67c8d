"""The evaluation of sparse decoding: cache policies, reads, and measures of locality."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from llmaas_eval.sparse.cli import main
from llmaas_eval.sparse.locality import Selection, Spread, likeness, selection, spread
from llmaas_eval.sparse.policies import POLICIES, Trace, hit_rate, simulate
from llmaas_eval.sparse.reads import (
    Flash,
    Operands,
    busiest_first,
    coalesced,
    predicted,
    read_cost,
)
from llmaas_eval.sparse.scales import DRAWS, coverage, fit_sigma


def flags(*rows, n=8):
    found = np.zeros((len(rows), n), np.bool_)
    for row, channels in zip(found, rows, strict=True):
        row[list(channels)] = True
    return found


def trace(*contexts, n=8, n_prompt=0, busy=None):
    """Return a trace of one layer; each context is a list of tokens' channels."""
    active = np.stack([flags(*tokens, n=n) for tokens in contexts])[:, :, None]
    order = np.arange(n, 0, -1.0) if busy is None else np.array(busy, float)
    return Trace(active, n_prompt, order[None])


def random_trace(seed, n_layers=2):
    random = np.random.default_rng(seed)
    p = random.uniform(0.1, 0.9, (n_layers, 24))
    drift = random.normal(0, 0.2, (3, 1, n_layers, 24))
    return Trace(random.random((3, 40, n_layers, 24)) < p + drift, 8, p)


def demanded(one, policy, capacity):
    missed = simulate(one, POLICIES[policy](one), capacity).demanded[:, 0]
    return [np.flatnonzero(row).tolist() for row in missed]


def test_lfu_as_in_the_papers_figure_12():
    one = trace([[0, 1, 4, 6], [0, 4, 6, 7], [1]], busy=[9, 0, 8, 7, 0, 6, 0, 0])
    # the cache begins with 0, 2, 3 and 5; channel 7 replaces channel 1
    assert demanded(one, "LFU, context", 4) == [[1, 4, 6], [7], [1]]


def test_counts_of_a_context_end_with_it():
    begun = [[0, 1], [0, 1], [0, 1]]
    one = trace(begun, [[2, 3], [2, 3], [0, 1]], n=4)
    assert demanded(one, "LFU, context", 2)[3:] == [[2, 3], [], [0, 1]]
    assert demanded(one, "LFU, task", 2)[3:] == [[2, 3], [2, 3], []]


def test_a_prompt_counts_where_it_is_to():
    one = trace([[2, 3], [2, 3], [2, 3], [0, 1], [2, 3], [0, 1]], n=4, n_prompt=3)
    assert demanded(one, "LFU, context", 2) == [[], [2, 3], [0, 1]]  # the cache begins with 0 and 1
    other = trace([[2], [2], [2], [2], [3], [2]], n=4, n_prompt=3)
    assert demanded(other, "LFU, context and prompt", 1) == [[2], [3], []]
    assert demanded(other, "LFU, context", 1) == [[2], [3], [2]]


def test_halved_counts_forget():
    tokens = [[0]] * 64 + [[1]] * 20
    rates = [
        hit_rate(one := trace(tokens, n=2), POLICIES[name](one), 1)
        for name in ("LFU, halved every 8", "LFU, halved every 128", "LRU")
    ]
    assert rates[0] > rates[1]
    assert rates[2] == pytest.approx(83 / 84)


def test_static_never_changes():
    assert demanded(trace([[0, 5], [5], [0, 5]]), "static", 2) == [[5], [5], [5]]


def best_possible(one, capacity):
    """Return the hits of the best of all sequences of caches."""
    active = one.decoded[:, 0]
    channels = range(active.shape[1])
    hits = {frozenset(np.argsort(-one.busy[0])[:capacity].tolist()): 0}
    for row in active:
        used = set(np.flatnonzero(row).tolist())
        after = {}
        for cached, n in hits.items():
            for some in combinations(channels, capacity):
                if set(some) <= cached | used:
                    kept = frozenset(some)
                    after[kept] = max(after.get(kept, 0), n + len(cached & used))
        hits = after
    return max(hits.values())


@pytest.mark.parametrize("seed", range(5))
def test_belady_is_the_best_possible(seed):
    random = np.random.default_rng(seed)
    one = Trace(random.random((1, 12, 1, 6)) < 0.5, 0, random.random((1, 6)))
    rate = hit_rate(one, POLICIES["Belady"](one), 3)
    assert rate * one.decoded.sum() == pytest.approx(best_possible(one, 3))


@pytest.mark.parametrize("policy", POLICIES)
def test_larger_caches_hit_more_and_none_more_than_belady(policy):
    one = random_trace(0)
    scores, belady = POLICIES[policy](one), POLICIES["Belady"](one)
    rates = [hit_rate(one, scores, n) for n in (0, 6, 12, 18, 24)]
    assert rates == sorted(rates)
    assert (rates[0], rates[-1]) == (0, 1)
    assert all(
        hit_rate(one, belady, n) >= rate for n, rate in zip((6, 12), rates[1:], strict=False)
    )


def test_one_cache_of_all_layers_may_give_a_layer_more():
    one = Trace(np.zeros((1, 20, 2, 4), np.bool_), 0, np.ones((2, 4)))
    one.active[:, :, 0] = True
    pooled = one.pooled()
    assert hit_rate(one, POLICIES["LFU, task"](one), 2) <= 0.5
    assert hit_rate(pooled, POLICIES["LFU, task"](pooled), 4) > 0.9


def test_what_is_read_ahead_is_not_demanded():
    one = random_trace(1)
    scores = POLICIES["LFU, task"](one)
    ahead = predicted(one, 1)
    missed = simulate(one, scores, 8, ahead)
    assert not (missed.preloaded & missed.demanded).any()
    assert not (missed.demanded & ~one.decoded).any()
    assert not (missed.preloaded & ~ahead).any()
    assert missed.demanded.sum() < simulate(one, scores, 8).demanded.sum()


def test_groups_are_predicted_by_the_first_layer_of_the_one_before():
    active = np.zeros((1, 1, 6, 6), np.bool_)
    active[0, 0] = np.eye(6, dtype=np.bool_)  # layer i uses channel i
    one = Trace(active, 0, np.ones((6, 6)))
    assert predicted(one, 1)[0].argmax(axis=1).tolist() == [0, 0, 1, 2, 3, 4]
    assert predicted(one, 2)[0].argmax(axis=1).tolist() == [0, 0, 0, 0, 2, 2]


def test_reads_are_joined_up_to_the_gap_that_costs_a_read():
    flash = Flash(read_us=9, bytes_per_us=1000)  # 9000 bytes
    missing = flags([0, 1, 11], [0, 12], n=16)
    cost = coalesced(missing, 1000, flash)
    assert cost.n_reads == 3  # 0 to 11, over a gap of nine; 0; 12
    assert cost.n_bytes == 14_000
    assert cost.us == 3 * 9 + 14
    assert coalesced(np.zeros_like(missing), 1000, flash).us == 0


@pytest.mark.parametrize("seed", range(5))
def test_no_other_way_to_join_reads_is_cheaper(seed):
    random = np.random.default_rng(seed)
    missing, flash = random.random(14) < 0.5, Flash(9, 1000)
    at = np.flatnonzero(missing)
    costs = []
    for cuts in np.ndindex(*[2] * (len(at) - 1)):
        parts = np.split(at, np.flatnonzero(cuts) + 1)
        costs.append(sum(9 + (part[-1] - part[0] + 1) * 3 for part in parts))
    assert coalesced(missing[None], 3000, flash).us == min(costs)


def test_a_larger_model_reads_more_of_the_same():
    one = random_trace(2)
    missed = simulate(one, POLICIES["static"](one), 6)
    order = np.broadcast_to(np.arange(24), (2, 24))
    small = read_cost(missed, order, 1, Operands(2, 24, 512), Flash()).on_demand
    large = read_cost(missed, order, 1, Operands(4, 240, 512), Flash()).on_demand
    assert large.n_reads == pytest.approx(20 * small.n_reads)
    per_token = missed.demanded.sum() / len(one.decoded) * 512
    assert small.n_bytes >= per_token


def test_layers_of_a_group_lie_side_by_side():
    one = Trace(np.zeros((1, 1, 2, 8), np.bool_), 0, np.ones((2, 8)))
    one.active[0, 0, :, 3] = True
    order, flash = np.arange(8)[None], Flash(9, 1000)
    operands = Operands(2, 8, 4000)
    scores = POLICIES["static"](one)
    waited = read_cost(simulate(one, scores, 0), order, 2, operands, flash)
    ahead = read_cost(simulate(one, scores, 0, predicted(one, 2)), order, 2, operands, flash)
    assert waited.on_demand.n_reads == 2  # a layer does not know the next one's channels
    assert (ahead.ahead.n_reads, ahead.ahead.n_bytes) == (1, 8000)
    assert ahead.on_demand.us == 0


def test_the_busiest_lie_first_and_a_cache_of_them_leaves_few_reads():
    one = random_trace(3)
    order = busiest_first(one, 1)
    assert (np.diff(np.take_along_axis(one.busy, order, axis=1)) <= 0).all()
    missed = simulate(one, POLICIES["static"](one), 12)
    by_index = np.broadcast_to(np.arange(24), (2, 24))
    costs = [
        read_cost(missed, some, 1, Operands(2, 24, 1024), Flash()).on_demand.us
        for some in (order, by_index)
    ]
    assert costs[0] < costs[1]
    grouped = busiest_first(one, 2)[0]
    assert (np.diff(one.busy.sum(axis=0)[grouped]) <= 0).all()


def test_coverage_by_hand():
    assert coverage(np.array([0.4, 0.1, 0.1, 0.1, 0.1, 0.1, 0.0, 0.0, 0.05, 0.05])) == 0.6


@pytest.mark.parametrize(("family", "sigma"), [("attn_qkv", 0.5), ("ffn_down", 0.5)])
def test_a_fitted_sigma_gives_back_the_coverage(family, sigma):
    random = np.random.default_rng(1)
    sizes = random.permutation(DRAWS[family]())[:100_000].reshape(200, 500)
    sizes *= np.exp(sigma * random.standard_normal(500))
    p = (sizes > np.median(sizes)).mean(axis=0)
    assert fit_sigma(DRAWS[family](), 0.5, coverage(p)) == pytest.approx(sigma, rel=0.15)


class FakeReader:
    """Reader of layers whose operands turn by 60 degrees, twice, and then stay."""

    n_layer = 5

    def read(self, tokens):
        a, b = np.linalg.qr(np.random.default_rng(tokens[0]).standard_normal((64, 2)))[0].T
        angles = np.minimum(np.arange(self.n_layer), 2) * np.pi / 3
        rows = np.outer(np.cos(angles), a) + np.outer(np.sin(angles), b)
        return {
            (i, family): np.tile(x, (len(tokens), 1))
            for i, x in enumerate(rows)
            for family in DRAWS
        }


def test_likeness_by_distance():
    rows = {
        (r.family, r.distance): r for r in likeness(FakeReader(), np.array([[1, 2, 3]]), 1, 0.5)
    }
    near = rows["ffn_up", 1]
    assert near.cosine == pytest.approx([0.5, 0.5, 1, 1])
    assert near.precision[2:] == [1, 1]
    assert rows["ffn_up", 2].cosine == pytest.approx([-0.5, 0.5, 1])


def test_hot_channels_of_a_context_are_selected_there():
    tokens = [[0, 1]] * 8
    one = trace(tokens, [[2, 3]] * 8)
    found = selection(one, 0.25)
    assert (found.seen, found.by_context, found.by_task) == (1, 1, 0)


def test_what_a_row_measures_does_not_hide_what_it_is_of():
    about = {"sparsity", "task", "family", "policy"}
    assert not about & {*Selection._fields, *Spread._fields}


def test_spread_tells_even_use_from_uneven():
    even = spread(
        Trace(np.random.default_rng(0).random((2, 400, 2, 20)) < 0.5, 0, np.ones((2, 20)))
    )
    assert even.entropy > 0.99
    assert np.mean(even.coverage) == pytest.approx(0.3, abs=0.03)
    assert even.overlap == pytest.approx(even.by_chance, abs=0.03)
    one = spread(trace([[0, 1]] * 4, [[2, 3]] * 4))
    assert (one.overlap, one.by_chance) == (1, 0.5)
    assert one.deciles[0] == 0


def test_it_says_what_is_missing(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("llmaas_eval.sparse.cli.find_spec", lambda name: name)
    with pytest.raises(SystemExit):
        main(["--data", str(tmp_path)])
    assert f"no folder {tmp_path / 'lm'}" in capsys.readouterr().err
    monkeypatch.setattr("llmaas_eval.sparse.cli.find_spec", lambda _: None)
    with pytest.raises(SystemExit):
        main([])
    assert "llmaas-plugins[train]" in capsys.readouterr().err

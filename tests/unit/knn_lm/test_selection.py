"""The pairs kept by Algorithm 1, and by the methods compared with it."""

from __future__ import annotations

import numpy as np
import pytest
from soak import scale
from subsets import HOWS, OBJECTIVE, Full, random_full, same

from llmaas_eval.knn.baselines import merge, random_pairs
from llmaas_plugins.knn_lm.selection.algorithms import choose, offline
from llmaas_plugins.knn_lm.selection.objective import Members

# -- one batch -----------------------------------------------------------------------------------


def some_of(p_lm, n, how="draw", seed=0, sums=None):
    sums = np.zeros(len(p_lm), np.float32) if sums is None else sums
    return choose(
        OBJECTIVE, np.asarray(p_lm, np.float32), sums, n, how, np.random.default_rng(seed)
    )


def test_top_takes_the_highest_bounds_and_each_counts_as_one():
    taken, weights = some_of([0.9, 0.1, 0.5, 0.01, 0.7], 2, "top")
    assert taken.tolist() == [1, 3]
    assert weights.tolist() == [1, 1]


def test_what_the_subset_says_already_is_not_taken():
    sums = np.array([0, 3, 0, 0], np.float32)
    assert some_of([0.5, 0.1, 0.5, 0.9], 2, "top", sums=sums)[0].tolist() == [0, 2]
    taken = [some_of([0.1, 0.1], 1, seed=seed, sums=sums[:2])[0][0] for seed in range(100)]
    assert sum(taken) < 5  # its loss is 0, so it is almost never drawn


def test_draws_are_as_likely_as_the_loss_is_large():
    p_lm = np.array([0.9, 0.5, 0.1, 0.02, 0.001, 0.3], np.float32)
    n, n_draws = 2, scale(4000, 100_000)
    hits, weights = np.zeros(6), np.zeros(6)
    for seed in range(n_draws):
        taken, found = some_of(p_lm, n, seed=seed)
        hits[taken] += 1
        weights[taken] = found
    loss = -np.log(OBJECTIVE.probability(p_lm, np.zeros(6, np.float32)))
    chances = n * loss / loss.sum()
    assert (chances < 1).all()
    assert np.allclose(hits / n_draws, chances, atol=5 * np.sqrt(0.25 / n_draws))
    assert np.allclose(weights, 1 / chances, rtol=1e-5)


def test_pair_that_is_sure_to_be_drawn_counts_as_one_and_leaves_the_others_their_chances():
    p_lm = np.array([1e-30, *[0.5] * 9], np.float32)
    hits = np.zeros(10)
    for seed in range(2000):
        taken, weights = some_of(p_lm, 4, seed=seed)
        hits[taken] += 1
        assert taken[0] == 0
        assert np.allclose(weights, [1, 3, 3, 3])
    assert np.allclose(hits[1:] / 2000, 1 / 3, atol=0.07)


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("n", [0, 1, 7, 50, 80])
def test_as_many_as_are_wanted_or_all_there_are(how, n):
    p_lm = np.random.default_rng(1).random(50)
    for seed in range(20):
        taken, weights = some_of(p_lm, n, how, seed)
        assert len(taken) == len(weights) == min(n, 50)
        assert (np.diff(taken) > 0).all()
        assert (weights >= 1).all()


@pytest.mark.parametrize("how", HOWS)
def test_none_of_nothing(how):
    taken, weights = some_of([], 3, how)
    assert len(taken) == len(weights) == 0


@pytest.mark.parametrize("how", HOWS)
def test_target_that_the_model_takes_for_impossible_is_kept(how):
    p_lm = [0.5] * 6 + [0.0]
    for seed in range(10):
        taken, weights = some_of(p_lm, 3, how, seed)
        assert 6 in taken
        assert len(taken) == 3
        assert np.isfinite(weights).all()


@pytest.mark.parametrize("p_lm", [1.0, 0.0])
def test_pairs_without_any_difference_are_as_likely(p_lm):
    hits = np.zeros(10)
    for seed in range(1000):
        taken, weights = some_of([p_lm] * 10, 3, seed=seed)
        hits[taken] += 1
        assert np.allclose(weights, 10 / 3)
    assert np.allclose(hits / 1000, 0.3, atol=0.08)


def test_pairs_that_come_together_are_drawn_together_by_chance_alone():
    """Otherwise only one of several neighbors in a conversation could ever be kept."""
    together = 0
    for seed in range(600):
        taken, _ = some_of([0.5] * 4, 2, seed=seed)
        together += taken.tolist() == [0, 1]
    assert 60 <= together <= 140  # one in six


# -- Algorithm 1 ---------------------------------------------------------------------------------


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("size", [1, 3, 10, 21, 199])
def test_selection_has_its_size_and_no_pair_twice(how, size):
    found = offline(random_full(1, 200), size, OBJECTIVE, how=how)
    assert len(found) == len(found.weights) == len(set(found.indices.tolist())) == size
    assert 0 <= found.indices.min() <= found.indices.max() < 200


@pytest.mark.parametrize("how", HOWS)
def test_same_seed_same_selection(how):
    full = random_full(2, 300)
    found = [offline(full, 60, OBJECTIVE, how=how, seed=seed) for seed in (5, 5, 6)]
    assert same(found[0], found[1])
    assert not same(found[0], found[2])


@pytest.mark.parametrize("size", [40, 41, 1000])
def test_all_is_kept_where_there_is_room(size):
    full, told = random_full(3, 40), []
    found = offline(full, size, OBJECTIVE, progress=told.append)
    assert found.indices.tolist() == list(range(40))
    assert (found.weights == 1).all()
    assert (full.asked, told) == ([], [40])


@pytest.mark.parametrize("n", [3000, 300_000])
def test_keys_are_read_of_b_pairs_in_each_of_t_rounds_however_many_there_are(n):
    full = Full(np.zeros((n, 1)), np.arange(n), np.full(n, 0.5))
    told = []
    offline(full, 80, OBJECTIVE, rounds=4, candidates=3, progress=told.append)
    assert [len(asked) for asked in full.asked] == [60] * 4
    assert all((np.diff(asked) > 0).all() for asked in full.asked)  # in file order
    assert told == [20] * 4


def test_what_a_round_took_is_not_looked_at_again():
    full = random_full(4, 100)
    found = offline(full, 60, OBJECTIVE, rounds=3, candidates=100)
    for i in range(3):
        assert not set(found.indices[: 20 * i]) & set(full.asked[i])
        assert len(full.asked[i]) == 100 - 20 * i


@pytest.mark.parametrize("last", [0, 1, 3])
def test_progress_can_end_it_between_two_rounds(last):
    full, rounds = random_full(5, 500), []

    def told(_n):
        rounds.append(len(full.asked))
        if len(rounds) > last:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        offline(full, 100, OBJECTIVE, progress=told)
    assert rounds == list(range(1, last + 2))  # and no key is read after it


def test_later_rounds_leave_out_what_earlier_ones_say():
    """Two positions have a hundred equal pairs each; some pairs of each suffice."""
    full = Full(np.repeat([[0.0], [9.0]], 100, axis=0), np.zeros(200), np.repeat([0.1, 0.2], 100))
    first = offline(full, 40, OBJECTIVE, how="top", rounds=1, candidates=10)
    assert (first.indices < 100).all()  # pairs at the likelier position do not look better
    several = offline(full, 40, OBJECTIVE, how="top", rounds=10, candidates=50)
    assert 15 <= (several.indices < 100).sum() <= 25


def test_weights_make_a_drawn_selection_stand_for_the_full_datastore():
    """The sums behind p_kNN are unbiased, at positions unknown to the selection."""
    full = random_full(6, 200, n_dims=2, n_values=3)
    places = random_full(7, 30, n_dims=2, n_values=3)
    wanted = Members(1.0, 2)
    wanted.add(full.pairs, full.values)
    wanted = wanted.sums(places.pairs, places.values)
    found = []
    for seed in range(scale(400, 10_000)):
        kept = offline(full, 40, OBJECTIVE, rounds=1, candidates=5, seed=seed)
        distances = ((places.pairs[:, None] - full.pairs[kept.indices]) ** 2).sum(axis=2)
        alike = places.values[:, None] == full.values[kept.indices]
        found.append((np.exp(-distances) * alike * kept.weights).sum(axis=1))
    error = np.std(found, axis=0) / np.sqrt(len(found))
    assert (np.abs(np.mean(found, axis=0) - wanted) < 5 * error + 1e-4).all()
    bare = offline(full, 40, OBJECTIVE, rounds=1, candidates=5)
    assert bare.weights.min() < 0.5 * bare.weights.max()  # the chances did differ


# -- what they are compared with -----------------------------------------------------------------


def test_random_pairs_are_as_likely_as_each_other():
    hits = np.zeros(10)
    for seed in range(2000):
        found = random_pairs(10, 3, seed)
        assert (np.diff(found.indices) > 0).all()
        assert found.weights.tolist() == [1, 1, 1]
        hits[found.indices] += 1
    assert np.allclose(hits / 2000, 0.3, atol=0.06)
    assert random_pairs(4, 9).indices.tolist() == [0, 1, 2, 3]
    assert same(random_pairs(100, 20, 1), random_pairs(100, 20, 1))


def literal_merge(full, neighbors):
    """Return the kept neighbors and how many each stands for, merging one pair at a time."""
    weights = dict.fromkeys(range(len(full)), 1)
    for i in range(len(full)):
        if i not in weights:
            continue
        distances = ((full.pairs[i].astype(np.float64) - full.pairs) ** 2).sum(axis=1)
        others = [j for j in np.argsort(distances).tolist() if j != i]
        for j in others[:neighbors]:
            if full.values[j] == full.values[i] and j in weights:
                weights[i] += weights.pop(j)
    return weights


@pytest.mark.parametrize("n", [1, 2, 9, 120])
@pytest.mark.parametrize("neighbors", [1, 5, 100])
def test_merging_is_that_of_one_pair_after_the_other(n, neighbors):
    full = random_full(n, n, n_values=2)
    wanted = literal_merge(full, neighbors)
    found = merge(full.pairs, full.values, n, neighbors=neighbors)
    assert found.indices.tolist() == list(wanted)
    assert found.weights.tolist() == list(wanted.values())
    assert found.weights.sum() == n
    few = merge(full.pairs, full.values, 4, neighbors=neighbors)
    heaviest = sorted(wanted, key=lambda i: (-wanted[i], i))[:4]
    assert few.indices.tolist() == sorted(heaviest)
    assert few.weights.tolist() == [wanted[i] for i in sorted(heaviest)]


def test_merging_of_more_pairs_than_are_looked_at_together():
    full, told = random_full(11, 700), []
    found = merge(full.pairs, full.values, 2000, neighbors=8, progress=told.append)
    assert (found.weights.sum(), sum(told), len(told)) == (700, 700, 2)
    wanted = literal_merge(full, 8)
    assert dict(zip(found.indices.tolist(), found.weights.tolist(), strict=True)) == wanted


def test_merging_of_nothing():
    assert len(merge(np.empty((0, 3), np.float32), np.empty(0, np.int32), 5)) == 0

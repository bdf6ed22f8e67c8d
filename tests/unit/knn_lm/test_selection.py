"""The pairs kept by Algorithm 1 and Algorithm 2, and by the methods compared with them."""

from __future__ import annotations

import numpy as np
import pytest
from soak import scale
from subsets import Full, random_full

from llmaas_eval.knn.baselines import merge, random_pairs
from llmaas_plugins.knn_lm.selection.algorithms import Online, choose, offline, online
from llmaas_plugins.knn_lm.selection.objective import Members, Objective

OBJECTIVE = Objective(theta=1.0)
HOWS = ["draw", "top"]


def same(one, other):
    return np.array_equal(one.indices, other.indices) and np.array_equal(one.weights, other.weights)


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


# -- Algorithm 2 ---------------------------------------------------------------------------------


def started(full, size, **settings):
    return Online(full, size, OBJECTIVE, buffer=20, **({"shares": (0.1, 0.2, 0.4, 1.0)} | settings))


def run(selecting, n_come, **kwargs):
    return list(selecting.advance(n_come, **kwargs))


@pytest.mark.parametrize("how", HOWS)
def test_each_subset_takes_its_share_of_every_buffer(how):
    selecting = started(random_full(1, 100), 100, how=how)
    assert run(selecting, 100) == [20] * 5
    assert {share: len(s) for share, s in selecting.selections.items()} == {
        0.1: 10, 0.2: 20, 0.4: 40, 1.0: 100,
    }  # fmt: skip
    for selection in selecting.selections.values():
        places = selection.indices // 20
        assert (np.bincount(places) == len(selection) // 5).all()
        assert len(set(selection.indices.tolist())) == len(selection)
    assert (selecting.selections[1.0].weights == 1).all()


def test_a_subset_that_outgrows_the_limit_is_given_up_and_only_the_last_of_them_is_kept():
    full = random_full(2, 400)
    selecting = started(full, 30)
    lengths = [
        {share: len(s) for share, s in selecting.selections.items()} for _ in selecting.advance(400)
    ]
    assert lengths[0] == {0.1: 2, 0.2: 4, 0.4: 8, 1.0: 20}
    assert lengths[1] == {0.1: 4, 0.2: 8, 0.4: 16, 1.0: 40}  # given up: 40 is above 30
    assert lengths[2] == {0.1: 6, 0.2: 12, 0.4: 24, 1.0: 40}
    # 0.4 is given up too, and 1.0 is no longer useful
    assert lengths[3] == {0.1: 8, 0.2: 16, 0.4: 32}
    assert lengths[8] == {0.1: 18, 0.2: 32}
    assert lengths[-1] == {0.1: 32}


@pytest.mark.parametrize(
    ("n_come", "n_best"),
    [
        (0, 0),
        (20, 20),  # everything
        (40, 30),  # 0.4 has 16, not above 0.6 * 30: what 1.0 had, cut to the limit
        (60, 24),
        (80, 30),  # 0.2 has 16: what 0.4 had
        (100, 20),
        (160, 30),
        (200, 20),
        (400, 30),  # even 0.1 is beyond the limit
    ],
)
def test_the_largest_subset_within_the_limit_is_best_unless_it_is_below_six_tenths(n_come, n_best):
    selecting = started(random_full(3, 400), 30)
    run(selecting, n_come)
    best = selecting.best()
    assert len(best) == len(best.weights) == len(set(best.indices.tolist())) == n_best
    assert n_come == 0 or best.indices.max() < n_come
    assert same(best, selecting.best())


def test_of_two_that_outgrow_the_limit_at_once_the_smaller_is_best():
    selecting = started(random_full(3, 60), 7)
    run(selecting, 20)
    lengths = {share: len(s) for share, s in selecting.selections.items()}
    assert lengths == {0.1: 2, 0.2: 4, 0.4: 8, 1.0: 20}
    best = selecting.best()
    assert len(best) == 7
    assert set(best.indices.tolist()) < set(selecting.selections[0.4].indices.tolist())
    run(selecting, 40)
    assert {share: len(s) for share, s in selecting.selections.items()} == {0.1: 4, 0.2: 8}


def test_each_buffer_has_draws_of_its_own():
    full = Full(np.arange(100)[:, None] * 99, np.zeros(100), np.full(100, 0.5))
    selecting = started(full, 100)
    run(selecting, 100)
    places = selecting.selections[0.4].indices.reshape(5, 8) % 20
    assert len(np.unique(places, axis=0)) > 1


@pytest.mark.parametrize("how", HOWS)
def test_going_on_is_the_same_as_never_having_stopped(how):
    full = random_full(4, 400)
    whole, stopped = (started(full, 30, how=how, seed=3) for _ in range(2))
    for n_come in (15, 70, 71, 170, 190, 400):
        for selecting in (whole, stopped):
            run(selecting, n_come, is_end=n_come == 400)
        assert stopped.n_seen == whole.n_seen
        assert stopped.selections.keys() == whole.selections.keys()
        assert all(same(s, whole.selections[k]) for k, s in stopped.selections.items())
        assert same(stopped.best(), whole.best())
        saved, n_seen = stopped.selections, stopped.n_seen
        stopped = started(full, 30, how=how, seed=3)
        stopped.resume(saved, n_seen)


def test_it_can_end_after_any_buffer_and_has_read_only_what_it_took():
    full = random_full(5, 400)
    selecting = started(full, 100)
    for _ in selecting.advance(400):
        if selecting.n_seen == 60:
            break
    assert [len(asked) for asked in full.asked] == [20] * 3
    assert len(selecting.best()) == 60
    assert run(selecting, 400) == [20] * 17


def test_a_key_that_cannot_be_read_changes_nothing():
    full = random_full(6, 100)
    selecting = started(full, 30)
    run(selecting, 40)
    before = dict(selecting.selections)

    def broken(indices):
        raise OSError("broken disk")

    full.keys, keys = broken, full.keys
    with pytest.raises(OSError, match="broken disk"):
        run(selecting, 100)
    assert (selecting.n_seen, selecting.selections) == (40, before)
    full.keys = keys
    assert run(selecting, 100) == [20] * 3


def test_what_does_not_fill_a_buffer_waits_unless_it_is_the_end():
    full = random_full(7, 50)
    selecting = started(full, 100)
    assert run(selecting, 19) == []
    assert run(selecting, 47) == [20, 20]
    assert (selecting.n_seen, len(selecting.best())) == (40, 40)
    assert run(selecting, 47, is_end=True) == [7]
    assert {share: len(s) for share, s in selecting.selections.items()} == {
        0.1: 5, 0.2: 9, 0.4: 19, 1.0: 47,
    }  # fmt: skip
    assert run(selecting, 50, is_end=True) == [3]
    assert run(selecting, 50, is_end=True) == []


@pytest.mark.parametrize("how", HOWS)
def test_last_pairs_of_which_a_share_takes_none(how):
    selecting = started(random_full(8, 1), 30, how=how)
    assert run(selecting, 1, is_end=True) == [1]
    assert {share: len(s) for share, s in selecting.selections.items()} == {
        0.1: 0, 0.2: 0, 0.4: 0, 1.0: 1,
    }  # fmt: skip


@pytest.mark.parametrize("how", HOWS)
def test_stream_without_any_pair(how):
    found = online(random_full(9, 0), 30, OBJECTIVE, how=how)
    assert len(found) == len(found.weights) == 0


def test_of_a_stream_as_of_a_full_datastore_the_hardest_are_on_top():
    full = Full(np.arange(200)[:, None] * 99, np.zeros(200), np.linspace(0.1, 0.9, 200))
    found = online(full, 100, OBJECTIVE, how="top", buffer=50, shares=(0.2, 0.4))
    wanted = np.arange(200).reshape(4, 50)[:, :20]  # of each buffer
    assert found.indices.tolist() == wanted.ravel().tolist()


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

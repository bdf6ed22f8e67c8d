"""The pairs kept by Algorithm 2, which selects from a stream."""

from __future__ import annotations

import numpy as np
import pytest
from subsets import HOWS, OBJECTIVE, Full, random_full, same

from llmaas_plugins.knn_lm.selection.algorithms import Online, online


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

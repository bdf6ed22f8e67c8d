"""Selection from an endless stream: always within the limit, and fair to old and new pairs."""

from __future__ import annotations

import numpy as np
import pytest

from llmaas_plugins.knn_lm.selection.objective import Objective
from llmaas_plugins.knn_lm.selection.priority_sampling import PrioritySampler

OBJECTIVE = Objective(theta=1.0)
SIZE, BUFFER = 100, 50


class Pairs:
    """Unrelated pairs that are all alike to the model."""

    n_dims = 2

    def __init__(self, n):
        self.values = np.arange(n, dtype=np.int32)
        self.p_lm = np.full(n, 0.2, np.float32)

    def keys(self, indices):
        return np.stack([indices, indices], axis=1).astype(np.float32)


def run(n, seed=0, stop=None):
    stream = PrioritySampler(Pairs(n), SIZE, OBJECTIVE, buffer=BUFFER, seed=seed)
    n_come = n if stop is None else stop
    return stream, [len(stream.kept.selection()) for _ in stream.advance(n_come)]


def test_what_fits_is_kept_whole():
    stream, sizes = run(SIZE)
    assert sizes == [50, 100]
    assert stream.kept.selection().indices.tolist() == list(range(SIZE))
    assert (stream.kept.selection().weights == 1).all()


def test_it_is_always_full():
    _, sizes = run(5000)
    assert set(sizes[1:]) == {SIZE}


def test_old_and_new_have_had_the_same_chance():
    """Each tenth of a thousand pairs is kept as often as any other."""
    counts = np.zeros(10)
    for seed in range(60):
        stream, _ = run(1000, seed)
        counts += np.bincount(stream.kept.selection().indices // 100, minlength=10)
    assert counts.min() > 0.8 * counts.mean()
    assert counts.max() < 1.2 * counts.mean()


def test_weights_add_up_to_all_that_came():
    totals = [run(2000, seed)[0].kept.selection().weights.sum() for seed in range(20)]
    assert np.mean(totals) == pytest.approx(2000, rel=0.05)


def test_what_the_model_finds_hard_is_kept_more_often_and_weighs_less():
    counts, weights = np.zeros(2), [[], []]
    for seed in range(30):
        source = Pairs(1000)
        source.p_lm[::2] = 0.8
        stream = PrioritySampler(source, SIZE, OBJECTIVE, buffer=BUFFER, seed=seed)
        for _ in stream.advance(1000):
            pass
        found = stream.kept.selection()
        for side in (0, 1):
            is_side = found.indices % 2 == side
            counts[side] += is_side.sum()
            weights[side].append(found.weights[is_side].sum())
    easy, hard = -np.log(OBJECTIVE.probability(np.array([0.8, 0.2]), np.zeros(2)))
    assert counts[1] / counts[0] == pytest.approx(hard / easy, rel=0.15)
    assert np.mean(weights[0]) == pytest.approx(500, rel=0.1)  # each half stands for itself
    assert np.mean(weights[1]) == pytest.approx(500, rel=0.1)


def test_on_demand_only_the_hardest_stay():
    source = Pairs(1000)
    source.p_lm[:] = np.random.default_rng(0).permutation(np.linspace(0.1, 0.9, 1000))
    stream = PrioritySampler(source, SIZE, OBJECTIVE, how="top", buffer=BUFFER)
    for _ in stream.advance(1000):
        pass
    found = stream.kept.selection()
    assert set(found.indices.tolist()) == set(np.argsort(source.p_lm)[:SIZE].tolist())
    assert (found.weights == 1).all()


def test_no_pair_twice():
    stream, _ = run(3000)
    assert len(set(stream.kept.selection().indices.tolist())) == len(stream.kept.selection())


@pytest.mark.parametrize("stop", [50, 100, 500, 1000])
def test_resumed_it_is_as_if_it_had_gone_on(stop):
    whole, _ = run(1500)
    part, _ = run(1500, stop=stop)
    rest = PrioritySampler(Pairs(1500), SIZE, OBJECTIVE, buffer=BUFFER)
    rest.resume(part.kept, part.n_seen)
    for _ in rest.advance(1500):
        pass
    assert rest.kept.selection().indices.tolist() == whole.kept.selection().indices.tolist()
    assert rest.kept.selection().weights == pytest.approx(whole.kept.selection().weights)


def test_a_buffer_that_is_not_full_waits_unless_it_is_the_end():
    stream = PrioritySampler(Pairs(70), SIZE, OBJECTIVE, buffer=BUFFER)
    assert list(stream.advance(70)) == [50]
    assert list(stream.advance(70, is_end=True)) == [20]
    assert list(stream.advance(70, is_end=True)) == []
    assert len(stream.kept.selection()) == 70

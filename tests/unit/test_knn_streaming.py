"""Selection over a stream without an end: always within the limit, old and new alike."""

from __future__ import annotations

import numpy as np
import pytest

from llmaas_plugins.knn_lm.objective import Objective
from llmaas_plugins.knn_lm.selection import Selection
from llmaas_plugins.knn_lm.streaming import Stream

OBJECTIVE = Objective(theta=1.0)
SIZE, BUFFER = 100, 50


class Pairs:
    """Pairs that have nothing to do with each other, all alike to the model."""

    n_dims = 2

    def __init__(self, n):
        self.values = np.arange(n, dtype=np.int32)
        self.p_lm = np.full(n, 0.2, np.float32)

    def keys(self, indices):
        return np.stack([indices, indices], axis=1).astype(np.float32)


def run(n, seed=0, stop=None):
    stream = Stream(Pairs(n), SIZE, OBJECTIVE, buffer=BUFFER, seed=seed)
    n_come = n if stop is None else stop
    return stream, [len(stream.selection) for _ in stream.advance(n_come)]


def test_what_fits_is_kept_whole():
    stream, sizes = run(SIZE)
    assert sizes == [50, 100]
    assert stream.selection.indices.tolist() == list(range(SIZE))
    assert (stream.selection.weights == 1).all()


def test_it_stays_within_the_limit_and_near_it():
    _, sizes = run(5000)
    assert max(sizes) <= SIZE
    assert min(sizes[2:]) >= 0.8 * SIZE - 1


def test_old_and_new_have_had_the_same_chance():
    """Of a thousand pairs, each tenth is kept as often as any other."""
    counts = np.zeros(10)
    for seed in range(60):
        stream, _ = run(1000, seed)
        counts += np.bincount(stream.selection.indices // 100, minlength=10)
    assert counts.min() > 0.8 * counts.mean()
    assert counts.max() < 1.2 * counts.mean()


def test_weights_add_up_to_all_that_came():
    totals = [run(2000, seed)[0].selection.weights.sum() for seed in range(20)]
    assert np.mean(totals) == pytest.approx(2000, rel=0.05)


def test_no_pair_twice():
    stream, _ = run(3000)
    assert len(set(stream.selection.indices.tolist())) == len(stream.selection)


@pytest.mark.parametrize("stop", [50, 100, 500, 1000])
def test_resumed_it_is_as_if_it_had_gone_on(stop):
    whole, _ = run(1500)
    part, _ = run(1500, stop=stop)
    rest = Stream(Pairs(1500), SIZE, OBJECTIVE, buffer=BUFFER)
    rest.resume(part.selection, part.rate, part.n_seen)
    for _ in rest.advance(1500):
        pass
    assert rest.selection.indices.tolist() == whole.selection.indices.tolist()
    assert rest.selection.weights == pytest.approx(whole.selection.weights)


def test_a_buffer_that_is_not_full_waits_unless_it_is_the_end():
    stream = Stream(Pairs(70), SIZE, OBJECTIVE, buffer=BUFFER)
    assert list(stream.advance(70)) == [50]
    assert list(stream.advance(70, is_end=True)) == [20]
    assert list(stream.advance(70, is_end=True)) == []
    assert isinstance(stream.selection, Selection)
    assert len(stream.selection) == 70

"""Widths found by lazy greedy search: floors, shares, nesting, and the optimum by enumeration."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from llmaas_plugins.elastic import probing
from llmaas_plugins.elastic.probing import Divergence
from llmaas_plugins.elastic.searching import UnitTimes, search
from llmaas_plugins.elastic.units import Blocks, Widths
from llmaas_plugins.model.forward import Evaluator
from llmaas_plugins.model.loading import loaded

SHARES = [1 - n / 10 for n in range(9)]
TIMES = UnitTimes(group=4.0, neuron=0.02)


def blocks(n_layers=4):
    return Blocks(
        arch="llama",
        n_layers=n_layers,
        n_groups=4,
        heads_per_group=2,
        head_dim=32,
        n_embd=256,
        n_ff=768,
        group_granule=1,
        granule=1,
        group_bytes=(64 * 256 * 4.0,) * n_layers,
        neuron_bytes=(3 * 256 * 2.0,) * n_layers,
    )


class Losses:
    """Sum over layers of convex costs of the left-out units."""

    def __init__(self, n_layers, seed):
        chance = np.random.default_rng(seed)
        self.groups, self.neurons = chance.lognormal(size=(2, n_layers))
        self.n_calls = 0

    def __call__(self, widths):
        self.n_calls += 1
        lost_groups = 1 - widths.groups / 4
        lost_neurons = 1 - widths.neurons / 768
        return float((self.groups * lost_groups**2 + self.neurons * lost_neurons**2).sum())


@pytest.mark.parametrize("seed", range(5))
def test_widths_are_nested_and_within_their_share(seed):
    model = blocks()
    found = search(model, SHARES, Losses(4, seed), TIMES, step=64, least=32)
    assert [widths.groups.tolist() for widths in found[:1]] == [[4] * 4]
    for share, widths in zip(SHARES, found, strict=True):
        assert model.share(widths) <= share + 1e-9
        assert widths.groups.min() >= 1
        assert widths.neurons.min() >= 32
        assert not (widths.neurons % 32).any()
    for wider, narrower in itertools.pairwise(found):
        assert (wider.groups >= narrower.groups).all()
        assert (wider.neurons >= narrower.neurons).all()


def test_what_is_left_out_is_what_costs_least():
    model = blocks(n_layers=1)
    losses = Losses(1, seed=3)
    (found,) = search(model, [0.6], losses, TIMES, step=64, least=32)
    # convex costs: no other widths of at most that share's time lose less than one step allows
    fitting = [
        Widths(np.array([groups], np.int32), np.array([neurons], np.int32))
        for groups, neurons in itertools.product(range(1, 5), range(32, 769, 32))
    ]
    best = min(losses(one) for one in fitting if model.share(one) <= 0.6)
    assert losses(found) <= 1.2 * best


def test_few_steps_are_asked_again():
    losses = Losses(8, seed=1)
    search(blocks(8), SHARES, losses, TIMES, step=64, least=32)
    n_steps = 8 * (3 + 11)
    # evaluating all 16 after each step would take 16 times as many
    assert losses.n_calls < 4 * n_steps


def test_neurons_that_are_no_whole_number_of_steps_are_cut_to_multiples_of_the_least():
    model = dataclasses.replace(blocks(), n_ff=172)
    found = search(model, SHARES, Losses(4, seed=0), TIMES, step=64, least=32)
    assert {n for widths in found for n in widths.neurons.tolist()} == {172, 128, 64, 32}
    assert found[0].neurons.tolist() == [172] * 4


def test_a_step_costs_what_it_loses_in_the_time_that_it_saves():
    """The first step of 100 neurons leaves out only 4."""
    model = dataclasses.replace(blocks(n_layers=2), n_ff=100, group_granule=4)

    def loss(widths):
        first, second = 100 - widths.neurons
        return 2.0 * first + 1.0 * max(second - 4, 0)

    (found,) = search(model, [0.95], loss, TIMES, step=32, least=32)
    assert found.neurons.tolist() == [100, 64]


def test_floors_end_the_search():
    (found,) = search(blocks(), [0.01], Losses(4, seed=0), TIMES, step=64, least=32)
    assert found.groups.tolist() == [1] * 4
    assert found.neurons.tolist() == [32] * 4


def test_what_predictions_are_compared_with_is_bounded(reference_model, monkeypatch):
    """Windows stay whole, but the kept predictions fit into the allowed memory."""
    text = np.arange(300, 360, dtype=np.int32)
    with loaded(reference_model) as model, Evaluator(model.model, 1) as evaluator:
        monkeypatch.setattr(probing, "_MOST_REFERENCE_BYTES", 20 * 4 * evaluator.n_vocab)
        divergence = Divergence(evaluator, text, 60)
        assert sum(map(len, divergence._expected)) == 20
        assert divergence.measure() == 0.0

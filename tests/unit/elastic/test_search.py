"""Widths found by lazy greedy search: floors, shares, nesting, and the optimum by enumeration."""

from __future__ import annotations

import dataclasses
import itertools
import tracemalloc

import numpy as np
import pytest

from llmaas_plugins import activate
from llmaas_plugins.elastic import probing
from llmaas_plugins.elastic.probing import Prober, TextLoss
from llmaas_plugins.elastic.searching import Search, n_losses, not_worse
from llmaas_plugins.elastic.uniform import uniform_widths
from llmaas_plugins.elastic.units import Blocks, Widths, blocks_of
from llmaas_plugins.model import batch_context
from llmaas_plugins.model.forward import Evaluator, log_softmax
from llmaas_plugins.model.loading import loaded

SHARES = [1 - n / 10 for n in range(9)]


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
        key_value_bytes=(32 * 256 * 4.0,) * n_layers,
        cuts_keys_values=False,
    )


def search(model, shares, loss, *, least=32):
    searching = Search(model, loss, least=least)
    return [searching.narrow(share) for share in shares]


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
    found = search(model, SHARES, Losses(4, seed))
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
    (found,) = search(model, [0.6], losses)
    # convex costs: no other widths of at most that share's time lose less than one step allows
    fitting = [
        Widths(np.array([groups], np.int32), np.array([neurons], np.int32))
        for groups, neurons in itertools.product(range(1, 5), range(32, 769, 32))
    ]
    best = min(losses(one) for one in fitting if model.share(one) <= 0.6)
    assert losses(found) <= 1.2 * best


def test_few_steps_are_asked_again():
    losses = Losses(8, seed=1)
    search(blocks(8), SHARES, losses)
    n_steps = 8 * (3 + 11)
    # evaluating all 16 after each step would take 16 times as many
    assert losses.n_calls < 4 * n_steps


def test_neurons_that_are_no_whole_number_of_steps_are_cut_to_multiples_of_the_least():
    model = dataclasses.replace(blocks(), n_ff=172)
    found = search(model, SHARES, Losses(4, seed=0))
    assert {n for widths in found for n in widths.neurons.tolist()} <= {172, 160, 128, 96, 64, 32}
    assert found[0].neurons.tolist() == [172] * 4


def test_a_step_costs_what_it_loses_by_the_bytes_that_it_saves():
    """The first step of 32 neurons leaves out only 4 of the second layer's 100."""
    model = dataclasses.replace(blocks(n_layers=2), n_ff=100, group_granule=4)

    def loss(widths):
        first, second = 100 - widths.neurons
        return 2.0 * first + 1.0 * max(second - 4, 0)

    (found,) = search(model, [0.95], loss)
    assert found.neurons.tolist() == [100, 64]


def test_floors_end_the_search():
    (found,) = search(blocks(), [0.01], Losses(4, seed=0))
    assert found.groups.tolist() == [1] * 4
    assert found.neurons.tolist() == [32] * 4


def test_progress_moves_from_the_first_loss_on_and_is_never_taken_back():
    shares = []
    searching = Search(blocks(), Losses(4, seed=0), least=32, progress=shares.append)
    for share in SHARES:
        searching.narrow(share)
    assert shares == sorted(shares)
    assert 0 < shares[0] < 0.05
    assert 0.75 < shares[-1] <= 1


@pytest.mark.parametrize("n_layers", [2, 8, 32])
def test_the_number_of_losses_is_about_as_estimated(n_layers):
    model, losses = blocks(n_layers), Losses(n_layers, seed=2)
    search(model, SHARES, losses)
    assert 0.4 < losses.n_calls / n_losses(model, 32) < 2.5


def judged(judge, model):
    uniform = uniform_widths(model, SHARES, np.arange(4.0), 32)
    searching = Search(model, Losses(4, seed=0), least=32)
    return not_worse(searching, SHARES, uniform, judge), uniform


def same(one, other):
    return (one.groups == other.groups).all() and (one.neurons == other.neurons).all()


def test_widths_that_another_text_judges_worse_are_the_uniform_ones():
    model = blocks()

    def judge(widths):  # below 65 % it wants what is uniform, above it wants what was found
        is_uniform = any(
            same(widths, one) for one in uniform_widths(model, SHARES, np.arange(4.0), 32)
        )
        return float(is_uniform) if model.share(widths) > 0.65 else -float(is_uniform)

    found, uniform = judged(judge, model)
    assert all(same(*pair) for pair in zip(found, uniform, strict=True))
    for wider, narrower in itertools.pairwise(found):
        assert (wider.groups >= narrower.groups).all()
        assert (wider.neurons >= narrower.neurons).all()


def test_the_search_goes_on_from_uniform_widths():
    model, n_asked = blocks(), []

    def judge(widths):  # only the first comparison is lost
        n_asked.append(1)
        return -100.0 if len(n_asked) == 1 else -float(len(n_asked))

    found, uniform = judged(judge, model)
    assert same(found[1], uniform[1])
    assert not same(found[2], uniform[2])
    for share, (wider, narrower) in zip(SHARES[1:], itertools.pairwise(found), strict=True):
        assert (wider.groups >= narrower.groups).all()
        assert (wider.neurons >= narrower.neurons).all()
        assert model.share(narrower) <= share + 1e-9


def test_widths_that_are_judged_better_are_kept():
    losses = Losses(4, seed=0)
    found, _ = judged(losses, blocks())
    expected = search(blocks(), SHARES, Losses(4, seed=0))
    assert all(same(*pair) for pair in zip(found, expected, strict=True))


def test_predictions_that_losses_compare_with_are_bounded(reference_model, monkeypatch):
    text = np.arange(300, 360, dtype=np.int32)
    with loaded(reference_model) as model, Evaluator(model.model, 1) as evaluator:
        windows = evaluator.cut(text, 20)
        assert [len(window) for window in windows] == [20, 20, 20]
        monkeypatch.setattr(probing, "_MOST_REFERENCE_BYTES", 50 * 2 * evaluator.n_vocab)
        loss = TextLoss(evaluator, windows, 0.0)
        assert len(loss.windows) == 2
        assert abs(loss.measure()) < 1e-3


def test_predictions_are_held_in_half_precision_only(reference_model, monkeypatch):
    """With a vocabulary of 262,144 tokens, a window in float32 would take half a gigabyte."""
    n_part = 1 << 20
    monkeypatch.setattr(batch_context, "_MOST_LOGITS_BYTES", n_part)
    text = np.random.default_rng(0).integers(300, 4000, 512).astype(np.int32)
    with loaded(reference_model) as model, Evaluator(model.model, 1) as evaluator:
        windows = evaluator.cut(text, 512)
        n_held = 2 * evaluator.n_vocab * sum(map(len, windows))
        tracemalloc.start()
        TextLoss(evaluator, windows)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert n_held > 3 * n_part
    assert peak < n_held + 5 * n_part


def test_a_loss_is_divergence_and_a_share_of_the_next_tokens(reference_model):
    """The result equals what plain formulas give for a narrower model."""
    blocks, text = blocks_of(reference_model), np.arange(300, 360, dtype=np.int32)
    prober = Prober(blocks)
    narrow = Widths(prober.full.groups // 2, prober.full.neurons // 2)
    with (
        activate({"on_error": "raise"}, {"prober": prober}),
        loaded(reference_model) as model,
        Evaluator(model.model, 1) as evaluator,
    ):
        (window,) = evaluator.cut(text, 512)
        full = log_softmax(np.concatenate([rows for _, rows in evaluator.read(window)]))
        losses = [TextLoss(evaluator, [window], share) for share in (0.0, 0.5)]
        prober.set(narrow)
        found = log_softmax(np.concatenate([rows for _, rows in evaluator.read(window)]))
        measured = [loss.measure() for loss in losses]
    divergence = (np.exp(full) * (full - found)).sum(axis=1).mean()
    nats = -found[np.arange(len(window) - 1), window[1:]].mean()
    assert measured[0] == pytest.approx(divergence, abs=2e-3)
    assert measured[1] - measured[0] == pytest.approx(0.5 * nats, rel=1e-3)

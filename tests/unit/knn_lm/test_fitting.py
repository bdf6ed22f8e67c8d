"""Fitting on held-out text whose true mixture is known."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from mixtures import held_out, literal, perplexity, scene
from soak import scale

from llmaas_plugins.knn_lm.mixing.grid_search import HeldOut, fit_mixture, search_threshold
from llmaas_plugins.knn_lm.mixing.mixture import Mixture

N = scale(1200, 20_000)
PAPER = Mixture(0.35, 0.0, 4.0)
ADAPTIVE = Mixture(0.8, 0.9, 1.5)
WARY = Mixture(0.7, 0.3, 3.0, far=8.0)
ONE_IN_FIVE_HUNDRED = 1.002


@pytest.fixture(scope="module")
def scenes():
    return [scene(seed, n_said=4) for seed in range(N)]


@pytest.fixture(scope="module")
def said(scenes):
    """Return a function that draws targets from a mixture."""

    def said(mixture, seed=0):
        rng = np.random.default_rng(seed)
        targets = []
        for s in scenes:
            chances = literal(s.p_lm, s.values, s.distances, s.weights, mixture)
            targets.append(rng.choice(len(chances), p=chances / chances.sum()))
        return held_out(scenes, targets)

    return said


@pytest.mark.parametrize("truth", [PAPER, ADAPTIVE, WARY], ids=str)
def test_what_is_fitted_is_as_good_as_the_truth(said, truth):
    held = said(truth)
    found = fit_mixture(held)
    assert found.perplexity <= perplexity(truth, held) * ONE_IN_FIVE_HUNDRED
    assert found.perplexity == pytest.approx(perplexity(found.mixture, held), rel=1e-4)
    alone = math.exp(-float(np.log(held.p_lm).mean()))
    assert found.perplexity_alone == pytest.approx(alone, rel=1e-4)
    assert found.perplexity < 0.98 * alone
    unseen = said(truth, seed=1)
    assert perplexity(found.mixture, unseen) <= 1.01 * perplexity(truth, unseen)


def test_the_papers_form_has_no_far_and_is_no_better(said):
    for truth in (PAPER, WARY):
        held = said(truth)
        paper, ours = fit_mixture(held, has_far=False), fit_mixture(held)
        assert paper.mixture.far == math.inf
        assert paper.perplexity >= ours.perplexity / ONE_IN_FIVE_HUNDRED
    assert paper.perplexity > 1.01 * ours.perplexity  # that of the cautious mixture


def test_neighbors_that_never_are_right_get_no_say(said):
    held = replace(said(PAPER), hits=np.zeros((N, 12), np.bool_))
    found = fit_mixture(held)
    assert found.mixture.alpha == 0
    assert found.perplexity == pytest.approx(found.perplexity_alone)


def test_neighbors_that_always_are_right_get_the_most(said):
    held = said(PAPER)
    found = fit_mixture(replace(held, hits=np.ones((N, 12), np.bool_)))
    assert (found.mixture.alpha, found.mixture.beta) == (0.95, 0)


def test_neighbors_that_are_wrong_where_the_model_is_sure_are_asked_where_it_is_not(said):
    held = said(PAPER)
    is_sure = np.arange(N) % 2 == 0
    halves = replace(
        held,
        p_max=np.where(is_sure, np.float32(0.99), np.float32(0.2)),
        p_lm=np.where(is_sure, np.float32(0.99), np.float32(0.01)),
        hits=np.broadcast_to(~is_sure[:, None], held.hits.shape),
    )
    found = fit_mixture(halves)
    assert (found.mixture.alpha, found.mixture.beta) == (0.95, 1.0)


def test_scale_of_distances_does_not_matter(said):
    held = said(WARY)
    ours, theirs = (
        fit_mixture(held),
        fit_mixture(replace(held, distances=held.distances * np.float32(1024))),
    )
    assert theirs.perplexity == pytest.approx(ours.perplexity, rel=1e-4)
    assert theirs.mixture.theta == pytest.approx(1024 * ours.mixture.theta)
    assert theirs.mixture.far == pytest.approx(1024 * ours.mixture.far)


def test_states_that_were_stored_to_the_last_bit_do_not_hide_how_far_others_are(said):
    """System prompts and templates give most states a neighbor at distance 0."""
    held = said(ADAPTIVE)
    distances = held.distances * np.float32(1e4)
    distances[: 2 * N // 3, 0] = 0
    repeated = replace(held, distances=distances)
    nearest = Mixture(0.8, 0.5, 5e3)
    assert fit_mixture(repeated).perplexity <= 1.02 * perplexity(nearest, repeated)
    all_alike = replace(held, distances=np.zeros_like(distances))
    assert fit_mixture(all_alike).perplexity <= fit_mixture(all_alike).perplexity_alone


def test_of_nothing_nothing_is_fitted():
    with pytest.raises(ValueError, match="no held-out targets"):
        fit_mixture(nothing())


# -- searches that are not worth their time ------------------------------------------------------

THRESHOLDS = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98, 0.99)
MOST_LOST = math.exp(5e-4)


def skipping(held, mixture, threshold):
    """Return the perplexity if the model alone decides wherever it is sure enough."""
    parts = (held.distances, held.hits, held.weights, held.p_lm, held.p_max)
    mixed = np.where(held.p_max >= threshold, held.p_lm, mixture.probability(*parts))
    return math.exp(-float(np.log(mixed).mean()))


@pytest.mark.parametrize("truth", [PAPER, ADAPTIVE, WARY], ids=str)
def test_the_lowest_threshold_is_taken_that_hardly_costs_anything(said, truth):
    held = said(truth)
    threshold, skipped = search_threshold(held, truth)
    assert threshold in {*THRESHOLDS, 1.0}
    searched = perplexity(truth, held)
    assert skipping(held, truth, threshold) <= searched * MOST_LOST * (1 + 1e-6)
    for lower in THRESHOLDS[: THRESHOLDS.index(threshold) if threshold < 1 else None]:
        assert skipping(held, truth, lower) > searched * MOST_LOST * (1 - 1e-6)
    assert skipped == pytest.approx((held.p_max >= threshold).mean() if threshold < 1 else 0)


def test_the_less_neighbors_help_a_sure_model_the_more_is_skipped(said):
    held = said(PAPER)
    found = [search_threshold(held, Mixture(alpha, 0.0, 4.0)) for alpha in (0.3, 0.03, 0.0)]
    assert found[0][0] >= found[1][0] >= found[2][0] == 0.5
    assert found[0][1] <= found[1][1] <= found[2][1] == pytest.approx((held.p_max >= 0.5).mean())


@pytest.mark.parametrize(("gain", "threshold"), [(0.04, 0.5), (0.06, 1.0)])
def test_one_part_in_two_thousand_may_be_lost(said, gain, threshold):
    """A hundredth of the targets gains this much from neighbors."""
    held, is_sure = said(PAPER), np.arange(N) % 100 == 0
    p_lm = np.float32(0.5)
    known = replace(
        held,
        p_max=np.where(is_sure, np.float32(0.995), np.float32(0.3)),
        p_lm=np.full(N, p_lm),
        hits=np.ones((N, 12), np.bool_),
    )
    alpha = float(np.expm1(gain) * p_lm / (1 - p_lm))
    assert search_threshold(known, Mixture(alpha, 0.0, 4.0))[0] == threshold


def test_nothing_is_skipped_where_neighbors_know_what_a_sure_model_does_not(said):
    held = said(PAPER)
    wrong = replace(
        held,
        p_max=np.full(N, 0.995, np.float32),
        p_lm=np.full(N, 0.001, np.float32),
        hits=np.ones((N, 12), np.bool_),
    )
    assert search_threshold(wrong, PAPER) == (1.0, 0.0)


def test_of_nothing_nothing_is_skipped():
    assert search_threshold(nothing(), PAPER) == (1.0, 0.0)


def nothing():
    none = np.empty((0, 12), np.float32)
    return HeldOut(none, none.astype(np.bool_), none, none[:, 0], none[:, 0])

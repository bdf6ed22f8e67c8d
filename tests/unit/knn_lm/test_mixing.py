"""The mixture, against a literal form of the paper's equations, and in place on logits."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from mixtures import Scene, held_out, literal, scene

from llmaas_plugins._native import logits_mix
from llmaas_plugins.knn_lm.datastore.datastore import Datastore
from llmaas_plugins.knn_lm.mixing.mixer import _mix
from llmaas_plugins.knn_lm.mixing.mixture import Mixture

MIXTURES = [
    Mixture(0.3, 0.0, 5.0),
    Mixture(0.9, 1.0, 0.5),
    Mixture(0.5, 0.5, 5.0, far=6.0),
    Mixture(1.0, 0.0, 20.0, far=0.0),
    Mixture(0.7, 0.3, 0.1, far=40.0),
    Mixture(0.0, 0.0, 1.0),
]
SEEDS = range(20)


def probability_of_all(place, mixture):
    """Return every token's probability, each computed on its own."""
    n = len(place.p_lm)
    held = held_out([place] * n, range(n))
    return mixture.probability(held.distances, held.hits, held.weights, held.p_lm, held.p_max)


def softmax(logits):
    powers = np.exp(logits.astype(np.float64) - logits.max())
    return powers / powers.sum()


@pytest.mark.parametrize("mixture", MIXTURES, ids=str)
def test_probability_is_that_of_the_paper(mixture):
    for seed in SEEDS:
        place = scene(seed)
        wanted = literal(place.p_lm, place.values, place.distances, place.weights, mixture)
        found = probability_of_all(place, mixture)
        assert np.allclose(found, wanted, rtol=1e-4, atol=1e-6)
        assert found.sum() == pytest.approx(1, abs=1e-4)


def test_without_far_and_weights_it_is_eq_33_to_the_letter():
    place = scene(1)
    ones = np.ones_like(place.weights)
    near = np.exp(-place.distances.astype(np.float64) / 4.0)  # Eq 32
    p_knn = np.bincount(place.values, near, len(place.p_lm)) / near.sum()  # Eq 2
    weight = 0.4 * (1 - 0.5 * place.p_lm.max())  # Eq 33
    wanted = (1 - weight) * place.p_lm + weight * p_knn  # Eq 1
    place = Scene(place.p_lm, place.values, place.distances, ones)
    assert np.allclose(probability_of_all(place, Mixture(0.4, 0.5, 4.0)), wanted, rtol=1e-5)


def test_states_far_from_all_that_is_stored_are_left_to_the_model():
    place = scene(2)
    far_off = Scene(place.p_lm, place.values, place.distances + 500, place.weights)
    assert np.allclose(probability_of_all(far_off, Mixture(0.9, 0.0, 5.0, far=30.0)), place.p_lm)
    paper = Mixture(0.9, 0.0, 5.0)  # follows even distant neighbors
    assert np.allclose(
        probability_of_all(far_off, paper), probability_of_all(place, paper), rtol=1e-3, atol=1e-6
    )


def test_a_weight_is_as_many_neighbors_at_one_place():
    place = scene(3)
    counts = np.arange(1, 13)
    weighted = Scene(place.p_lm, place.values, place.distances, counts.astype(np.float32))
    repeated = Scene(
        place.p_lm,
        np.repeat(place.values, counts),
        np.repeat(place.distances, counts),
        np.ones(counts.sum(), np.float32),
    )
    mixture = Mixture(0.6, 0.2, 5.0, far=9.0)
    assert np.allclose(
        probability_of_all(weighted, mixture), probability_of_all(repeated, mixture), rtol=1e-5
    )


def test_neighbors_that_are_missing_are_at_no_distance():
    place = scene(4)
    mixture = Mixture(0.6, 0.2, 5.0, far=9.0)
    padded = Scene(
        place.p_lm,
        np.append(place.values, [1, 2]),
        np.append(place.distances, np.float32([np.inf] * 2)),
        np.append(place.weights, np.float32([1, 9])),
    )
    assert np.allclose(probability_of_all(padded, mixture), probability_of_all(place, mixture))


@pytest.mark.parametrize("mixture", MIXTURES, ids=str)
def test_logits_in_place_become_the_same_distribution(mixture):
    for seed in SEEDS:
        place = scene(seed)
        logits = np.log(np.maximum(place.p_lm, 1e-20)) + np.float32(3.5)
        wanted = literal(softmax(logits), place.values, place.distances, place.weights, mixture)
        folded = place.distances - mixture.theta * np.log(place.weights)
        logits_mix(
            logits, place.values, folded.astype(np.float32),
            mixture.alpha, mixture.beta, mixture.theta, mixture.far,
        )  # fmt: skip
        assert np.allclose(softmax(logits), wanted, atol=2e-5)


def test_a_datastores_neighbors_are_mixed_in_with_their_weights(tmp_path):
    rng = np.random.default_rng(6)
    n, n_embd, n_vocab, k = 300, 24, 40, 20
    keys = rng.standard_normal((n, n_embd)).astype(np.float16)
    values = rng.integers(0, n_vocab, n).astype(np.int32)
    weights = rng.uniform(0.5, 9, n).astype(np.float32)
    Datastore.write(
        tmp_path / "selected",
        fingerprint=bytes(32),
        keys=keys,
        values=values,
        weights=weights,
        origins=np.zeros((n, 2), np.int32),
        conversations=["one"],
        basis=None,
        settings={},
    )
    datastore = Datastore.open(tmp_path / "selected", bytes(32))
    for mixture in MIXTURES:
        query = rng.standard_normal(n_embd).astype(np.float32)
        logits = rng.standard_normal(n_vocab).astype(np.float32) * 3
        distances = ((keys.astype(np.float64) - query) ** 2).sum(axis=1)
        near = np.argsort(distances)[:k]
        wanted = literal(softmax(logits), values[near], distances[near], weights[near], mixture)
        _mix(logits, datastore.search(query, k), mixture, 1.0)
        assert np.allclose(softmax(logits), wanted, atol=2e-5)
    datastore.close()


# -- settings ------------------------------------------------------------------------------------


@pytest.mark.parametrize("mixture", MIXTURES, ids=str)
def test_json_gives_the_mixture_back(mixture):
    text = json.dumps(mixture.as_json(), allow_nan=False)
    assert Mixture.from_json(json.loads(text)) == mixture


SOUND = {"alpha": 0.3, "beta": 0.5, "theta": 2.0, "far": None}


@pytest.mark.parametrize(
    "junk",
    [
        None,
        [],
        "alpha",
        {},
        {name: SOUND[name] for name in ("alpha", "beta", "theta")},
        {**SOUND, "alpha": None},
        {**SOUND, "alpha": "much"},
        {**SOUND, "alpha": -0.1},
        {**SOUND, "alpha": 1.1},
        {**SOUND, "alpha": math.nan},
        {**SOUND, "beta": 2},
        {**SOUND, "beta": [0.5]},
        {**SOUND, "theta": 0},
        {**SOUND, "theta": -1},
        {**SOUND, "theta": math.inf},
        {**SOUND, "theta": math.nan},
        {**SOUND, "theta": 10**400},
        {**SOUND, "far": math.nan},
        {**SOUND, "far": -math.inf},
        {**SOUND, "far": {}},
    ],
    ids=str,
)
def test_what_is_no_mixture_is_refused(junk):
    assert Mixture.from_json(SOUND) == Mixture(0.3, 0.5, 2.0)
    with pytest.raises(ValueError, match=r"expected|must be|could not convert"):
        Mixture.from_json(junk)

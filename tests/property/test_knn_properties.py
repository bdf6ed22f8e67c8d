"""Scans, mixing and datastore files with random sizes and values."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from soak import scale

from llmaas_hooks import StoreError
from llmaas_plugins._native import KnnCodes, knn_quantize, knn_scan, logits_mix
from llmaas_plugins.knn_lm.datastore.datastore import Datastore
from llmaas_plugins.knn_lm.datastore.pca import fit_basis

MODEL = bytes(32)

seeds = st.integers(0, 2**32 - 1)


@st.composite
def keys_and_query(draw):
    rng = np.random.default_rng(draw(seeds))
    n, n_dims = draw(st.integers(1, 400)), draw(st.integers(1, 150))
    points = rng.standard_normal((n + 1, n_dims))
    points *= 10.0 ** rng.uniform(-draw(st.integers(0, 3)), 3, n_dims)
    points += draw(st.sampled_from([0, 1, 1000]))
    if draw(st.booleans()):  # many equal keys
        points = points[rng.integers(0, len(points), len(points)) // 3]
    points = points.astype(np.float32)
    return points[:n], points[n]


def coded(keys):
    codes = KnnCodes.empty(len(keys), keys.mean(0), keys.std(0))
    knn_quantize(codes, keys)
    return codes


@settings(max_examples=scale(150, 5000), deadline=None)
@given(keys_and_query(), st.integers(1, 500), st.integers(0, 400))
def test_a_scan_in_two_parts_is_a_scan(pair, n_best, cut):
    keys, query = pair
    codes, cut = coded(keys), min(cut, len(keys))
    whole = knn_scan(codes, query, n_best)
    parts = [knn_scan(codes, query, n_best, 0, cut), knn_scan(codes, query, n_best, cut)]
    rows, distances = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    best = np.lexsort((rows, distances))[:n_best]
    assert np.array_equal(rows[best], whole.rows)
    assert np.array_equal(distances[best], whole.distances)


@settings(max_examples=scale(150, 5000), deadline=None)
@given(keys_and_query())
def test_a_distance_is_off_by_no_more_than_its_coding(pair):
    keys, query = pair
    codes = coded(keys)
    rows, distances = knn_scan(codes, query, len(keys))
    exact = ((keys[rows].astype(np.float64) - query) ** 2).sum(1)
    lost = np.sqrt(((0.51 * np.outer(codes.scales[rows], codes.steps)) ** 2).sum(1))
    size = np.sqrt(((keys[rows].astype(np.float64) - codes.center) ** 2).sum(1)) + np.sqrt(
        ((query.astype(np.float64) - codes.center) ** 2).sum()
    )
    of_coding = (2 * np.sqrt(exact) + lost) * lost  # |a + b|² - |a|², with |b| at most what is lost
    assert np.all(np.abs(distances - exact) <= of_coding + 1e-4 * size**2 + 1e-9)


@settings(max_examples=scale(150, 5000), deadline=None)
@given(
    seeds,
    st.integers(2, 300),
    st.integers(1, 120),
    st.tuples(st.floats(0, 0.99), st.floats(0, 1), st.floats(1e-3, 1e4)),
)
def test_mixing_is_the_weighted_sum(seed, n_vocab, k, weights):
    alpha, beta, theta = weights
    rng = np.random.default_rng(seed)
    logits = (rng.standard_normal(n_vocab) * rng.choice([0.1, 3, 30])).astype(np.float32)
    values = rng.integers(0, n_vocab, k).astype(np.int32)
    distances = (rng.random(k) * rng.choice([1, 100, 1e5])).astype(np.float32)
    p_lm = softmax(logits)
    near = np.exp(-(distances.astype(np.float64) - distances.min()) / theta)
    p_knn = np.bincount(values, near, n_vocab) / near.sum()
    w = alpha * (1 - beta * p_lm.max())
    logits_mix(logits, values, distances, alpha, beta, theta)
    assert np.allclose(softmax(logits), (1 - w) * p_lm + w * p_knn, atol=3e-5)


def softmax(logits):
    powers = np.exp(logits.astype(np.float64) - logits.max())
    return powers / powers.sum()


@pytest.fixture(scope="module")
def folder():
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.mark.slow
@settings(max_examples=scale(40, 1000), deadline=None)
@given(st.data())
def test_what_is_written_is_read_and_what_is_forgotten_is_gone(folder, data):
    path = folder / "datastore.knn"
    rng = np.random.default_rng(data.draw(seeds))
    n, n_embd = data.draw(st.integers(0, 200)), data.draw(st.integers(1, 80))
    names = [f"conversation {i}" for i in range(data.draw(st.integers(1, 6)))]
    keys = rng.standard_normal((n, n_embd)).astype(np.float16)
    numbers = rng.integers(0, len(names), n)
    origins = np.stack([numbers, np.arange(n)], axis=1).astype(np.int32)
    n_dims = data.draw(st.none() | st.integers(1, n_embd)) if n else None
    Datastore.write(
        path,
        fingerprint=MODEL,
        keys=keys,
        values=np.arange(n, dtype=np.int32),
        origins=origins,
        conversations=names,
        basis=n_dims and fit_basis(keys, n_dims),
        settings={},
    )
    gone = set(data.draw(st.lists(st.sampled_from(names))))
    kept = np.flatnonzero([names[i] not in gone for i in numbers])

    assert Datastore.without(path, gone) == n - len(kept)

    store = Datastore.open(path, MODEL)
    assert store.conversations == tuple(name for name in names if name not in gone)
    found = store.search(rng.standard_normal(n_embd, dtype=np.float32), 200)
    assert sorted(found.values) == list(kept)
    assert np.array_equal(store.origins[:, 1], kept)
    store.close()


@settings(max_examples=scale(60, 5000), deadline=None)
@given(st.data())
def test_damage_is_refused_or_changes_nothing(folder, data):
    path = folder / "damaged.knn"
    keys = np.random.default_rng(0).standard_normal((60, 40)).astype(np.float16)
    if not path.exists():
        Datastore.write(
            path,
            fingerprint=MODEL,
            keys=keys,
            values=np.arange(60, dtype=np.int32),
            origins=np.zeros((60, 2), np.int32),
            conversations=["one"],
            basis=None,
            settings={},
        )
        path.rename(path.with_suffix(".whole"))
    whole = bytearray(path.with_suffix(".whole").read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] ^= data.draw(st.integers(1, 255))
    path.write_bytes(whole)
    try:
        store = Datastore.open(path, MODEL)
    except StoreError:
        return
    query = keys[3].astype(np.float32)
    try:
        found = store.search(query, 60)
    except StoreError as error:
        assert "damaged key" in str(error)  # noqa: PT017 -- it may also be undamaged
    else:
        exact = ((keys.astype(np.float64) - query) ** 2).sum(1)
        assert np.array_equal(found.rows, np.argsort(exact, kind="stable"))
    finally:
        store.close()
        path.unlink()

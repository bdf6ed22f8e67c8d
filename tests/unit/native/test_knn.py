"""Nearest neighbors and mixing through the Python wrapper, on every instruction set."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from llmaas_hooks.errors import StoreError
from llmaas_plugins._native import (
    KNN_MAX_BEST,
    KnnCodes,
    NativeError,
    Status,
    kernels_name,
    kernels_select,
    knn_quantize,
    knn_rescore,
    knn_scan,
    knn_sum,
    logits_mix,
    logits_peek,
)

KERNELS = ("generic", "avx2", "avx512", "avx512vnni")


@pytest.fixture(params=KERNELS)
def kernels(request):
    before = kernels_name()
    try:
        kernels_select(request.param)
    except NativeError:
        pytest.skip(f"this CPU has no {request.param}")
    yield request.param
    kernels_select(before)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def coded(keys):
    codes = KnnCodes.empty(len(keys), keys.mean(0), keys.std(0))
    knn_quantize(codes, keys)
    return codes


def squared_distances(keys, query):
    return ((keys.astype(np.float64) - query) ** 2).sum(1)


def softmax(logits):
    powers = np.exp(logits.astype(np.float64) - logits.max())
    return powers / powers.sum()


@pytest.fixture
def rows_file(tmp_path):
    """Yield a file of float16 rows after seven other bytes: descriptor, offset, rows."""
    keys = normal(300, 48).astype(np.float16)
    path = tmp_path / "rows"
    path.write_bytes(b"1234567" + keys.tobytes())
    fd = os.open(path, os.O_RDONLY)
    yield fd, 7, keys
    os.close(fd)


@pytest.mark.parametrize("n_dims", [1, 64, 100, 300])
def test_a_scan_finds_the_nearest_rows(kernels, n_dims):
    keys, query = normal(3000, n_dims), normal(n_dims, seed=1)
    exact = squared_distances(keys, query)
    found = knn_scan(coded(keys), query, 200)
    assert len(np.intersect1d(found.rows[:120], np.argsort(exact)[:100])) >= 98
    assert np.all(np.diff(found.distances) >= 0)
    assert np.allclose(found.distances, exact[found.rows], rtol=0.02, atol=0.02)


def test_every_instruction_set_finds_the_same(kernels):
    keys, query = normal(2000, 257), normal(257, seed=1)
    found = knn_scan(coded(keys), query, 300)
    kernels_select("generic")
    assert all(
        np.array_equal(a, b) for a, b in zip(found, knn_scan(coded(keys), query, 300), strict=True)
    )


def test_a_key_finds_itself_at_no_distance(kernels):
    keys = normal(500, 96)
    found = knn_scan(coded(keys), keys[77], 2)
    assert found.rows[0] == 77
    assert abs(found.distances[0]) < 1e-3 * found.distances[1]


def large_dimension(keys, query):
    keys[:, 5] += 1e4
    query[5] += 1e4


def wide_dimension(keys, query):
    keys[:, 5] *= 30
    query[5] *= 30


def large_row(keys, query):
    keys[3] *= 1e3


@pytest.mark.parametrize("change", [large_dimension, wide_dimension, large_row])
def test_a_dimension_or_a_row_unlike_the_others_costs_these_nothing(change):
    keys, query = normal(2000, 64), normal(64, seed=1)
    change(keys, query)
    nearest = np.argsort(squared_distances(keys, query))[:100]
    found = knn_scan(coded(keys), query, 120)
    assert len(np.intersect1d(found.rows, nearest)) >= 98


def test_threads_can_share_a_scan():
    keys, query = normal(5000, 64), normal(64, seed=1)
    codes = coded(keys)
    whole = knn_scan(codes, query, 50)
    with ThreadPoolExecutor(2) as pool:
        halves = list(pool.map(lambda first: knn_scan(codes, query, 50, first, 2500), (0, 2500)))
    rows = np.concatenate([half.rows for half in halves])
    distances = np.concatenate([half.distances for half in halves])
    best = np.lexsort((rows, distances))[:50]
    assert np.array_equal(rows[best], whole.rows)
    assert np.array_equal(distances[best], whole.distances)


def test_of_few_rows_all_are_found():
    keys = normal(3, 10)
    assert sorted(knn_scan(coded(keys), keys[0], 100).rows) == [0, 1, 2]
    assert len(knn_scan(coded(keys), keys[0], 100, 3, 0).rows) == 0


def test_keys_that_are_all_alike_have_no_steps():
    keys = np.tile(normal(1, 20), (50, 1))
    found = knn_scan(coded(keys), keys[0], 5)
    assert list(found.rows) == [0, 1, 2, 3, 4]
    assert np.abs(found.distances).max() < 1e-12


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e30])
def test_what_cannot_be_a_distance_is_refused(value):
    keys = normal(10, 20)
    codes = coded(keys)
    keys[4, 7] = value
    with pytest.raises(NativeError, match="must be finite"):
        knn_quantize(codes, keys)
    with pytest.raises(NativeError, match="must be finite"):
        knn_scan(codes, keys[4], 3)


def test_codes_in_two_parts_find_what_codes_in_one_find(kernels):
    keys = normal(3000, 200) / (1 + np.arange(200, dtype=np.float32)) ** 0.7
    parts = KnnCodes.empty(3000, keys.mean(0), keys.std(0), n_front=64)
    knn_quantize(parts, keys)
    for query in keys[::500] * np.float32(1.1):
        whole, split = knn_scan(coded(keys), query, 80), knn_scan(parts, query, 80)
        assert np.array_equal(whole.rows, split.rows)
        assert np.array_equal(whole.distances, split.distances)


@pytest.mark.parametrize("large", [slice(0, 2), slice(-2, None)], ids=["in front", "behind"])
@pytest.mark.parametrize("size", [10, 100, 1000])
def test_a_few_large_dimensions_hide_no_row_from_codes_in_two_parts(large, size):
    keys = normal(700, 1024)
    keys[:, large] *= size
    center, steps = keys.mean(0), keys.std(0)
    whole, parts = KnnCodes.empty(700, center, steps), KnnCodes.empty(700, center, steps, 256)
    knn_quantize(whole, keys)
    knn_quantize(parts, keys)
    for query in keys[::100]:
        for n_best in (1, 24):
            expected, found = knn_scan(whole, query, n_best), knn_scan(parts, query, n_best)
            assert np.array_equal(found.rows, expected.rows)
            assert np.array_equal(found.distances, expected.distances)


def test_parts_that_do_not_fit_together_are_refused():
    codes = coded(normal(10, 20))
    parts = {name: getattr(codes, name) for name in KnnCodes.__slots__ if name != "handle"}
    KnnCodes(**parts)
    with pytest.raises(NativeError, match="for 20 dimensions"):
        KnnCodes(**parts | {"scales": codes.scales[:5]})
    with pytest.raises(NativeError, match="for 20 dimensions"):
        KnnCodes(**parts | {"front_norms": codes.norms})
    with pytest.raises(NativeError, match="expected float32"):
        KnnCodes(**parts | {"scales": codes.scales.astype(float)})
    with pytest.raises(NativeError, match=r"query \(21,\)"):
        knn_scan(codes, normal(21), 3)
    with pytest.raises(NativeError, match=r"keys \(10, 21\)"):
        knn_quantize(codes, normal(10, 21))
    for n_best, first, n in ((0, 0, 10), (KNN_MAX_BEST + 1, 0, 10), (3, 5, 6), (3, 11, 0)):
        with pytest.raises(NativeError, match="EINVAL"):
            knn_scan(codes, normal(20), n_best, first, n)


def test_rescoring_gives_the_distances_of_the_stored_rows(kernels, rows_file):
    fd, offset, keys = rows_file
    query = normal(48, seed=2)
    rows = np.random.default_rng(0).integers(0, 300, 400).astype(np.int32)
    found = knn_rescore(fd, offset, knn_sum(keys), rows, query)
    expected = squared_distances(keys, query)[rows]
    assert np.allclose(found, expected, rtol=1e-5, atol=0)


def test_a_damaged_row_is_not_rescored(rows_file):
    fd, offset, keys = rows_file
    sums = knn_sum(keys)
    sums[8] ^= 1
    query = normal(48)
    knn_rescore(fd, offset, sums, np.array([7, 9], np.int32), query)
    with pytest.raises(NativeError) as caught:
        knn_rescore(fd, offset, sums, np.array([7, 8, 9], np.int32), query)
    assert caught.value.status == Status.ECORRUPT


def test_a_file_that_ends_early_is_refused(rows_file):
    fd, offset, keys = rows_file
    sums = np.append(knn_sum(keys), np.uint32(0))
    with pytest.raises(StoreError, match="No data available"):
        knn_rescore(fd, offset, sums, np.array([300], np.int32), normal(48))
    with pytest.raises(NativeError, match="301 rows"):
        knn_rescore(fd, offset, sums, np.array([301], np.int32), normal(48))


@pytest.mark.parametrize("n_vocab", [4, 50, 1000])
def test_mixing_gives_the_weighted_sum_of_both_distributions(kernels, n_vocab):
    logits = 4 * normal(n_vocab)
    values = np.random.default_rng(1).integers(0, n_vocab, 40).astype(np.int32)
    distances = 30 * np.abs(normal(40, seed=2))
    p_lm, p_knn = softmax(logits), np.zeros(n_vocab)
    np.add.at(p_knn, values, np.exp(-distances.astype(float) / 5))
    w = 0.4 * (1 - 0.7 * p_lm.max())

    info = logits_mix(logits, values, distances, 0.4, 0.7, 5.0)

    assert np.allclose(softmax(logits), (1 - w) * p_lm + w * p_knn / p_knn.sum(), atol=1e-6)
    assert info.max_prob == pytest.approx(p_lm.max(), rel=1e-5)


def test_neighbors_that_are_all_far_away_count_as_if_they_were_near():
    values, distances = np.array([1, 2], np.int32), np.array([0, 3], np.float32)
    near, far = normal(10), normal(10)
    logits_mix(near, values, distances, 0.5, 0.0, 1.0)
    logits_mix(far, values, distances + 1e6, 0.5, 0.0, 1.0)
    assert np.array_equal(near, far)


def test_other_logits_keep_their_bits_and_banned_tokens_stay_banned():
    logits = normal(100)
    logits[[3, 50]] = -np.inf
    before = logits.copy()
    values = np.array([3, 4, 3, 5], np.int32)
    logits_mix(logits, values, np.array([1, 2, 3, 4], np.float32), 0.5, 0.0, 1.0)
    assert np.isneginf(logits[[3, 50]]).all()
    assert (logits[[4, 5]] > before[[4, 5]]).all()
    others = np.delete(np.arange(100), [4, 5])
    assert np.array_equal(logits[others], before[others])


def test_no_weight_or_no_neighbors_change_no_bit():
    logits = normal(64)
    before = logits.copy()
    values, distances = np.array([1], np.int32), np.array([1], np.float32)
    logits_mix(logits, values, distances, 0.0, 0.5, 1.0)
    logits_mix(logits, values[:0], distances[:0], 0.5, 0.5, 1.0)
    assert np.array_equal(logits, before)


def test_peeking_tells_how_sure_the_model_is(kernels):
    logits = 10 * normal(32_000)
    wide = logits.astype(np.float64)
    info = logits_peek(logits)
    assert info.max_prob == pytest.approx(softmax(logits).max(), rel=1e-5)
    assert info.log_sum_exp == pytest.approx(np.log(np.exp(wide).sum()), rel=1e-6)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_logits_that_are_none_are_refused(kernels, value):
    for place in (0, 31, 32, 99):
        logits = normal(100)
        logits[place] = value
        with pytest.raises(NativeError, match="NaN"):
            logits_peek(logits)
    with pytest.raises(NativeError, match="must hold a number"):
        logits_peek(np.full(100, -np.inf, np.float32))


def test_settings_and_neighbors_out_of_range_are_refused():
    values, distances = np.array([1, 99], np.int32), np.array([1, 2], np.float32)
    for alpha, beta, theta in (
        (1.5, 0, 1),
        (-1, 0, 1),
        (0.5, 1.1, 1),
        (0.5, 0, 0),
        (0.5, 0, np.nan),
    ):
        with pytest.raises(NativeError, match="EINVAL"):
            logits_mix(normal(100), values, distances, alpha, beta, theta)
    with pytest.raises(NativeError, match="EINVAL"):
        logits_mix(normal(99), values, distances, 0.5, 0.0, 1.0)
    with pytest.raises(NativeError, match="EINVAL"):
        logits_mix(normal(100), values, distances * np.float32(np.inf), 0.5, 0.0, 1.0)
    with pytest.raises(NativeError, match="2 values with 1 distances"):
        logits_mix(normal(100), values, distances[:1], 0.5, 0.0, 1.0)
    frozen = normal(100)
    frozen.flags.writeable = False
    with pytest.raises(NativeError, match="read-only"):
        logits_mix(frozen, values, distances, 0.5, 0.0, 1.0)

"""Codec round trips of random geometries, values and chunk lengths; damage is always detected."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmaas_plugins._native import (
    Codec,
    KVGeometry,
    NativeError,
    blob_init,
    blob_probe,
    blob_size,
    chunk_bound,
    chunk_cut,
    chunk_encode,
    chunk_verify,
    chunks_decode,
)

KEY = bytes(range(32))
N_CELLS = 24

rows = st.integers(1, 150).map(lambda n: 2 * n)


@st.composite
def geometries(draw):
    n_layer = draw(st.integers(1, 3))
    k_row = draw(st.lists(rows, min_size=n_layer, max_size=n_layer))
    v_row = draw(st.lists(st.just(0) | rows, min_size=n_layer, max_size=n_layer))
    type_v = draw(st.sampled_from([1, 30]))
    n_first = draw(st.integers(0, n_layer - 1))
    return KVGeometry(n_layer, draw(st.booleans()), 1, type_v, tuple(k_row), tuple(v_row), n_first)


def zeros(rng, n):
    return np.zeros(n, np.uint16)


def near_normal(rng, n):
    return rng.normal(size=n).astype(np.float16).view(np.uint16)


def wide(rng, n):
    return (rng.normal(size=n) * 2.0 ** rng.integers(-20, 9, n)).astype(np.float16).view(np.uint16)


def any_bits(rng, n):
    return rng.integers(0, 2**16, n, np.uint16)


def edges(rng, n):
    return rng.choice(np.array([0, 0x8000, 1, 0x3FF, 0x7BFF, 0x7C00, 0xFE01], np.uint16), n)


def top(rng, n):
    return rng.choice(np.array([0x7BFF, 0xFBFF, 0x7800, 0], np.uint16), n)


@st.composite
def blobs(draw):
    """Draw a blob whose values range from constant over near-normal to arbitrary bits."""
    geom = draw(geometries())
    fill = draw(st.sampled_from([zeros, near_normal, wide, any_bits, edges, top]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    blob = fill(rng, blob_size(geom, N_CELLS) // 2).view(np.uint8).copy()
    blob_init(geom, blob, list(range(N_CELLS)))
    return geom, blob


def f16_planes(geom, blob):
    """Return the f16 planes of a blob: whether each is V, and its float64[token, value]."""
    n_first = geom.n_first or geom.n_layer
    at = 8  # magic, sequence
    for layers in (slice(n_first), slice(n_first, None)):
        at += 8 + 12 * N_CELLS + 8  # a cache's head, its cells, and the head of their rows
        for is_v, rows_bytes in ((False, geom.k_row[layers]), (True, geom.v_row[layers])):
            for row in filter(None, rows_bytes):
                at += 12
                values = blob[at : at + N_CELLS * row].view(np.float16).astype(np.float64)
                at += N_CELLS * row
                if not is_v or geom.type_v == 1:
                    trans = is_v and geom.v_trans
                    shaped = values.reshape(-1, N_CELLS).T if trans else values.reshape(N_CELLS, -1)
                    yield is_v, shaped
        if layers.stop == geom.n_layer:
            break


def encode(geom, codec, blob, first, n_tokens):
    out = bytearray(chunk_bound(geom, codec, n_tokens))
    n = chunk_encode(geom, codec, blob, N_CELLS, first, n_tokens, KEY, out)
    return bytes(out[:n])


@settings(max_examples=60, deadline=None)
@given(blobs(), st.sampled_from([Codec.RAW, Codec.LOSSLESS]), st.integers(1, N_CELLS), st.data())
def test_exact_codecs_are_exact_for_every_bit_pattern(made, codec, n_tokens, data):
    geom, blob = made
    first = data.draw(st.integers(0, N_CELLS - n_tokens))
    payload = encode(geom, codec, blob, first, n_tokens)
    chunk_verify(payload, KEY)
    parts = [(0, first), (first, n_tokens), (first + n_tokens, N_CELLS - first - n_tokens)]
    others = [encode(geom, Codec.RAW, blob, at, n) if n else None for at, n in parts]
    others[1] = payload
    chosen = [(part[0], other) for part, other in zip(parts, others, strict=True) if other]
    back = bytearray(len(blob))
    blob_init(geom, back, list(range(N_CELLS)))
    chunks_decode(geom, [other for _, other in chosen], [at for at, _ in chosen], back, N_CELLS)
    assert back == bytes(blob)
    if all(geom.v_row):  # the blob alone does not show which layers have no V
        assert blob_probe(back) == (geom, N_CELLS)


@settings(max_examples=60, deadline=None)
@given(blobs())
def test_int8_stays_within_its_bound_or_refuses(made):
    geom, blob = made
    finite = all(np.isfinite(plane).all() for _, plane in f16_planes(geom, blob))
    try:
        payload = encode(geom, Codec.INT8, blob, 0, N_CELLS)
    except NativeError:
        assert not finite
        return
    assert finite
    back = blob.copy()
    chunks_decode(geom, [payload], [0], back, N_CELLS)
    pairs = zip(f16_planes(geom, blob), f16_planes(geom, back), strict=True)
    for (_, before), (_, after) in pairs:
        for at in range(0, before.shape[1], 64):
            x, y = before[:, at : at + 64], after[:, at : at + 64]
            amax = np.abs(x).max(1, keepdims=True)
            scale = amax / 127 * (1 + 2**-10) + 2**-24  # rounded up to an f16
            half_ulp = np.maximum(np.abs(y) * 2**-11, 2**-25)
            assert (np.abs(x - y) <= scale / 2 + half_ulp).all()


@settings(max_examples=80, deadline=None)
@given(blobs(), st.integers(1, 8))
def test_every_cut_of_planes_stays_within_its_bound(made, bits):
    geom, blob = made
    within = all((np.abs(plane) <= 32768).all() for _, plane in f16_planes(geom, blob))
    try:
        payload = encode(geom, Codec.PLANES, blob, 0, N_CELLS)
    except NativeError:
        assert not within
        return
    assert within
    cut = payload[: chunk_cut(payload, bits)]
    chunk_verify(cut, KEY)
    back = np.zeros_like(blob)
    blob_init(geom, back, list(range(N_CELLS)))
    chunks_decode(geom, [cut], [0], back, N_CELLS)
    pairs = zip(f16_planes(geom, blob), f16_planes(geom, back), strict=True)
    for (is_v, before), (_, after) in pairs:
        scale = value_scales(before) if is_v else key_scales(before)
        half_ulp = np.maximum(np.abs(after) * 2**-11, 2**-25)
        assert (np.abs(before - after) <= scale / 2**bits * 1.0001 + half_ulp).all()
    raw = encode(geom, Codec.RAW, blob, 0, N_CELLS)
    chunks_decode(geom, [raw, cut], [0, 0], blob, N_CELLS)
    assert np.array_equal(back, blob)  # also values that are not f16


def value_scales(values):
    """Return an upper bound of a token's scales, one for each 64 values."""
    out = np.empty_like(values)
    for at in range(0, values.shape[1], 64):
        out[:, at : at + 64] = np.abs(values[:, at : at + 64]).max(1, keepdims=True)
    return out * 9 / 8 + 2**-17


def key_scales(keys):
    """Return an upper bound of the channels' scales, one for each 16 tokens."""
    out = np.empty_like(keys)
    for at in range(0, len(keys), 16):
        high, low = keys[at : at + 16].max(0), keys[at : at + 16].min(0)
        out[at : at + 16] = np.maximum((high - low) / 2 * 6 / 5, np.abs(high + low) / 2 / 14)
    return out + 2**-17


@settings(max_examples=60, deadline=None)
@given(blobs(), st.sampled_from(list(Codec)), st.data())
def test_damage_is_found_and_harmless(made, codec, data):
    geom, blob = made
    try:
        payload = bytearray(encode(geom, codec, blob, 0, 16))
    except NativeError:
        return
    at = data.draw(st.integers(0, len(payload) - 1))
    payload[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(NativeError):
        chunk_verify(payload, KEY)
    with contextlib.suppress(NativeError):
        chunks_decode(geom, [payload], [0], blob, N_CELLS)

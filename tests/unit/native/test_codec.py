"""Chunk codecs through the Python wrapper: exactness, bounds, golden files, errors."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from llmaas_hooks.errors import CodecError
from llmaas_plugins._native import (
    Codec,
    KVGeometry,
    NativeError,
    Status,
    blob_init,
    blob_size,
    chunk_bound,
    chunk_cut,
    chunk_encode,
    chunk_peek,
    chunk_verify,
    chunks_decode,
    chunks_decode_at,
    chunks_land_at,
    crc32c,
    kernels_name,
    kernels_select,
    landings_fit,
)

GOLDEN = Path(__file__).parents[2] / "data" / "golden"
KEY = bytes(range(32))
ROW = 256


@pytest.fixture(params=["generic", "avx2", "avx512"])
def kernels(request):
    before = kernels_name()
    try:
        kernels_select(request.param)
    except NativeError:
        pytest.skip(f"this CPU has no {request.param}")
    yield request.param
    kernels_select(before)


def geometry(*, v_trans=False, n_layer=2):
    return KVGeometry(n_layer, v_trans, 1, 1, (ROW,) * n_layer, (ROW,) * n_layer)


def random_blob(geom, n_cells, seed=0):
    rng = np.random.default_rng(seed)
    size = blob_size(geom, n_cells)
    blob = rng.normal(size=size // 2).astype(np.float16).view(np.uint8).copy()
    blob_init(geom, blob, list(range(n_cells)))
    return blob


def rows_of(geom, blob, n_cells):
    """Return all rows as float16[plane, token, value], whatever the orientation."""
    planes, at = [], 24 + 12 * n_cells
    for plane in range(2 * geom.n_layer):
        at += 12
        values = np.frombuffer(bytes(blob[at : at + n_cells * ROW]), np.float16)
        trans = geom.v_trans and plane >= geom.n_layer
        planes.append(values.reshape(-1, n_cells).T if trans else values.reshape(n_cells, -1))
        at += n_cells * ROW
    return np.array(planes)


def encode(geom, codec, blob, n_cells, first=0, *, n_tokens=16, bits=8):
    out = bytearray(chunk_bound(geom, codec, n_tokens, bits))
    n = chunk_encode(geom, codec, blob, n_cells, first, n_tokens, KEY, out, bits)
    return bytes(out[:n])


@pytest.mark.parametrize("v_trans", [False, True])
@pytest.mark.parametrize("codec", [Codec.RAW, Codec.LOSSLESS])
def test_exact_codecs_give_the_blob_back(kernels, codec, v_trans):
    geom = geometry(v_trans=v_trans)
    blob = random_blob(geom, 40)
    chunks = [
        encode(geom, codec, blob, 40, first, n_tokens=n)
        for first, n in ((0, 16), (16, 16), (32, 8))
    ]
    back = np.zeros_like(blob)
    blob_init(geom, back, list(range(40)))
    assert chunks_decode(geom, chunks, (0, 16, 32), back, 40) == 3
    assert np.array_equal(back, blob)


def test_lossless_is_a_tenth_smaller_on_normal_values():
    geom = geometry()
    blob = random_blob(geom, 16)
    raw = len(encode(geom, Codec.RAW, blob, 16))
    assert len(encode(geom, Codec.LOSSLESS, blob, 16)) < 0.9 * raw


@pytest.mark.parametrize("v_trans", [False, True])
def test_int8_error_is_within_half_a_scale(kernels, v_trans):
    geom = geometry(v_trans=v_trans)
    blob = random_blob(geom, 16)
    back = blob.copy()
    chunks_decode(geom, [encode(geom, Codec.INT8, blob, 16)], [0], back, 16)
    x = rows_of(geom, blob, 16).astype(np.float64).reshape(4, 16, -1, 64)
    y = rows_of(geom, back, 16).astype(np.float64).reshape(4, 16, -1, 64)
    scale = np.abs(x).max(-1, keepdims=True) / 127 * (1 + 2**-10)
    half_ulp = np.abs(y) * 2**-11
    assert (np.abs(x - y) <= scale / 2 + half_ulp).all()


def decoded(geom, payload, blob, n_cells=16):
    back = blob.copy()
    assert chunks_decode(geom, [payload], [0], back, n_cells) == 1
    return rows_of(geom, back, n_cells).astype(np.float64)


@pytest.mark.parametrize("v_trans", [False, True])
@pytest.mark.parametrize("bits", range(1, 9))
def test_planes_error_is_within_half_a_cell(kernels, v_trans, bits):
    geom = geometry(v_trans=v_trans)
    blob = random_blob(geom, 16)
    x = rows_of(geom, blob, 16).astype(np.float64)
    y = decoded(geom, encode(geom, Codec.PLANES, blob, 16, bits=bits), blob)
    half_ulp = np.abs(y) * 2**-11
    keys, values = slice(2), slice(2, 4)
    high, low = x[keys].max(1, keepdims=True), x[keys].min(1, keepdims=True)
    scale = np.maximum((high - low) / 2 * 6 / 5, np.abs(high + low) / 2 / 14)
    assert (np.abs(x - y)[keys] <= scale / 2**bits * 1.0001 + half_ulp[keys]).all()
    scale = 9 / 8 * np.abs(x[values]).reshape(2, 16, -1, 64).max(-1).repeat(64, -1)
    assert (np.abs(x - y)[values] <= scale / 2**bits * 1.0001 + half_ulp[values]).all()


@pytest.mark.parametrize("bits", range(1, 8))
def test_the_beginning_of_planes_is_the_chunk_with_fewer_bits(kernels, bits):
    geom = geometry()
    blob = random_blob(geom, 16)
    payload = encode(geom, Codec.PLANES, blob, 16)
    cut = payload[: chunk_cut(payload, bits)]
    assert len(cut) == chunk_bound(geom, Codec.PLANES, 16, bits)
    chunk_verify(cut, KEY)
    assert chunk_peek(cut).bits == bits
    assert chunk_cut(cut, 8) == len(cut)
    assert chunk_cut(cut, 1) == chunk_cut(payload, 1)
    fresh = encode(geom, Codec.PLANES, blob, 16, bits=bits)
    assert np.array_equal(decoded(geom, cut, blob), decoded(geom, fresh, blob))


def test_a_cut_that_is_damaged_or_between_planes_is_found():
    geom = geometry()
    payload = encode(geom, Codec.PLANES, random_blob(geom, 16), 16)
    n = chunk_cut(payload, 3)
    with pytest.raises(NativeError, match="damaged"):
        chunk_peek(payload[: n + 1])
    with pytest.raises(NativeError, match="damaged"):
        chunk_verify(payload[: n - 1] + bytes([payload[n - 1] ^ 1]), KEY)
    with pytest.raises(NativeError, match=r"cut to 0 bits: .*out of range"):
        chunk_cut(payload, 0)


@pytest.mark.parametrize("codec", [Codec.RAW, Codec.LOSSLESS, Codec.INT8])
def test_other_codecs_are_not_cut(codec):
    geom = geometry()
    payload = encode(geom, codec, random_blob(geom, 16), 16)
    assert chunk_cut(payload, 1) == len(payload)
    assert chunk_peek(payload).bits == 0


def test_planes_of_four_bits_take_under_29_percent_with_all_beside_them():
    """The shape is the reference model's: 8 layers, 4 KV heads of 32."""
    geom = geometry(n_layer=8)
    sizes = {bits: chunk_bound(geom, Codec.PLANES, 16, bits) for bits in (8, 4, 2)}
    assert sizes == {8: 35200, 4: 18816, 2: 10624}
    assert sizes[4] <= 0.29 * 16 * geom.token_bytes


def test_a_loud_key_channel_takes_no_precision_from_the_others():
    geom = geometry(n_layer=1)
    blob = random_blob(geom, 16)
    loud = blob.copy()
    keys = loud[24 + 12 * 16 + 12 :][: 16 * ROW].view(np.float16).reshape(16, -1)
    keys[:, 5] = keys[:, 5] * 20 + 300
    plain = decoded(geom, encode(geom, Codec.PLANES, blob, 16, bits=4), blob)
    others = np.arange(ROW // 2) != 5
    back = decoded(geom, encode(geom, Codec.PLANES, loud, 16, bits=4), loud)
    assert np.array_equal(back[:, :, others], plain[:, :, others])


def test_planes_refuse_what_is_beyond_their_range():
    geom = geometry()
    blob = random_blob(geom, 16)
    blob[-2:] = np.array([32768], np.float16).view(np.uint8)
    encode(geom, Codec.PLANES, blob, 16)
    for value in (np.nextafter(np.float16(32768), np.float16(np.inf)), np.inf, np.nan):
        blob[-2:] = np.array([value], np.float16).view(np.uint8)
        with pytest.raises(NativeError, match=r"as PLANES .*cannot be represented"):
            encode(geom, Codec.PLANES, blob, 16)


def test_a_chunk_does_not_depend_on_the_orientation():
    plain, trans = geometry(), geometry(v_trans=True)
    blob = random_blob(plain, 32)
    moved = bytearray(blob_size(trans, 32))
    blob_init(trans, moved, list(range(32)))
    chunks = [encode(plain, Codec.RAW, blob, 32, first) for first in (0, 16)]
    chunks_decode(trans, chunks, [0, 16], moved, 32)
    assert np.array_equal(rows_of(plain, blob, 32), rows_of(trans, moved, 32))
    for codec in Codec:
        assert encode(plain, codec, blob, 32, 16) == encode(trans, codec, moved, 32, 16)


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.lkvc")), ids=lambda path: path.stem)
def test_golden_chunks_decode(kernels, path):
    meta = json.loads(path.with_suffix(".json").read_text())
    geom = KVGeometry.from_json(meta["geometry"])
    payload, expected = path.read_bytes(), path.with_suffix(".blob").read_bytes()
    n = meta["n_tokens"]
    chunk_verify(payload, bytes.fromhex(meta["key"]))
    back = bytearray(blob_size(geom, n))
    blob_init(geom, back, list(range(n)))
    assert chunks_decode(geom, [payload], [0], back, n) == 1
    assert back == expected


def test_golden_chunks_exist_for_every_codec():
    names = {path.stem for path in GOLDEN.glob("*.lkvc")}
    assert {f"v1-{codec.name.lower()}" for codec in Codec} <= names


def test_decode_at_addresses():
    geom = geometry()
    blob = random_blob(geom, 16)
    payload = np.frombuffer(encode(geom, Codec.RAW, blob, 16), np.uint8)
    back = blob.copy()
    back[-ROW:] = 0
    assert chunks_decode_at(geom, [payload.ctypes.data], [len(payload)], [0], back, 16) == 1
    assert np.array_equal(back, blob)


def test_peek_tells_the_header():
    geom = geometry()
    payload = encode(geom, Codec.INT8, random_blob(geom, 16), 16)
    info = chunk_peek(payload)
    assert info.codec is Codec.INT8
    assert (info.n_tokens, info.n_layer, info.type_k, info.type_v) == (16, 2, 1, 1)
    assert info.geom_hash == geom.hash == geometry(v_trans=True).hash
    assert info.body_bytes == len(payload) - 128


def test_int8_refuses_infinity_and_lossless_keeps_it():
    geom = geometry()
    blob = random_blob(geom, 16)
    blob[-2:] = np.array([np.inf], np.float16).view(np.uint8)
    with pytest.raises(NativeError, match=r"as INT8 .*cannot be represented") as caught:
        encode(geom, Codec.INT8, blob, 16)
    assert caught.value.status is Status.EUNSUPPORTED
    back = blob.copy()
    back[-ROW:] = 0
    chunks_decode(geom, [encode(geom, Codec.LOSSLESS, blob, 16)], [0], back, 16)
    assert np.array_equal(back, blob)


def test_verify_tells_damage_from_another_key():
    geom = geometry()
    payload = bytearray(encode(geom, Codec.INT8, random_blob(geom, 16), 16))
    chunk_verify(payload, KEY)
    with pytest.raises(CodecError, match=r"another key .*ESTALE"):
        chunk_verify(payload, bytes(32))
    with pytest.raises(NativeError, match="chunk key of 3 bytes, expected 32"):
        chunk_verify(payload, b"abc")
    payload[-1] ^= 1
    with pytest.raises(NativeError, match=r"damaged .*ECORRUPT") as caught:
        chunk_verify(payload, KEY)
    assert caught.value.status is Status.ECORRUPT


def test_a_bad_payload_is_named_and_those_before_it_are_in_place():
    geom = geometry()
    blob = random_blob(geom, 48)
    chunks = [encode(geom, Codec.RAW, blob, 48, first) for first in (0, 16, 32)]
    chunks[2] = chunks[2][:-1]
    back = bytearray(len(blob))
    blob_init(geom, back, list(range(48)))
    with pytest.raises(NativeError, match="payload 2 of 3") as caught:
        chunks_decode(geom, chunks, [0, 16, 32], back, 48)
    assert caught.value.n_done == 2
    assert np.array_equal(rows_of(geom, back, 48)[:, :32], rows_of(geom, blob, 48)[:, :32])


def test_other_geometry_is_stale():
    geom, other = geometry(), geometry(n_layer=3)
    payload = encode(geom, Codec.RAW, random_blob(geom, 16), 16)
    with pytest.raises(NativeError) as caught:
        chunks_decode(other, [payload], [0], random_blob(other, 16), 16)
    assert caught.value.status is Status.ESTALE


def test_short_destination_and_wrong_counts_are_errors():
    geom = geometry()
    blob = random_blob(geom, 16)
    with pytest.raises(NativeError, match="into 10 bytes") as caught:
        chunk_encode(geom, Codec.RAW, blob, 16, 0, 16, KEY, bytearray(10))
    assert caught.value.status is Status.ESPACE
    with pytest.raises(NativeError, match="1 payloads and 2 first cells"):
        chunks_decode(geom, [b""], [0, 1], blob, 16)
    with pytest.raises(NativeError, match="1 addresses and 0 sizes"):
        chunks_decode_at(geom, [1], [], [], blob, 16)
    with pytest.raises(NativeError, match=r"chunk of 300 tokens .*expected 1\.\.256"):
        chunk_bound(geom, Codec.RAW, 300)
    with pytest.raises(NativeError, match=r"and 9 bits, expected .* 1\.\.8 bits"):
        chunk_bound(geom, Codec.PLANES, 16, 9)
    with pytest.raises(BufferError):
        chunks_decode(geom, [], [], bytes(blob), 16)


def test_crc_and_kernel_names(kernels):
    assert kernels_name() == kernels
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(b"6789", crc32c(b"12345")) == 0xE3069283
    with pytest.raises(NativeError, match="known are generic, avx2, avx512"):
        kernels_select("sse9")


def places(geom, blob, n_cells):
    """Return landings in a blob itself."""
    found, at = [], 24 + 12 * n_cells
    for plane in range(2 * geom.n_layer):
        at += 12
        trans = geom.v_trans and plane >= geom.n_layer
        each = (2 * n_cells, 2 * n_cells, ROW // 2) if trans else (0, n_cells * ROW, 1)
        found.append((blob.ctypes.data + at, *each))
        at += n_cells * ROW
    return np.array(found, np.uint64)


def address_of(payload):
    return np.frombuffer(payload, np.uint8).ctypes.data


@pytest.mark.parametrize("v_trans", [False, True])
def test_landed_chunks_are_where_decoded_ones_are(kernels, v_trans):
    geom = geometry(v_trans=v_trans)
    blob, payloads = random_blob(geom, 40), []
    for first, n in ((0, 16), (16, 16), (32, 8)):
        payloads.append(encode(geom, Codec.PLANES, blob, 40, first, n_tokens=n))
    expected, found, firsts = blob.copy(), blob.copy(), (0, 16, 32)
    chunks_decode(geom, payloads, firsts, expected, 40)
    landings = places(geom, found, 40)
    assert landings_fit(geom, landings, 40)
    sizes = [len(payload) for payload in payloads]
    addresses = [address_of(payload) for payload in payloads]
    assert chunks_land_at(geom, addresses, sizes, firsts, landings, 40) == 3
    assert np.array_equal(found, expected)
    with pytest.raises(NativeError, match="payload 1 of 3") as caught:
        chunks_land_at(geom, addresses, [sizes[0], 5, sizes[2]], firsts, landings, 40)
    assert (caught.value.status, caught.value.n_done) == (Status.ECORRUPT, 1)


def test_landings_that_do_not_fit_are_refused():
    geom = geometry()
    blob = random_blob(geom, 16)
    payload = encode(geom, Codec.RAW, blob, 16)
    landings = places(geom, blob, 16)
    for wrong in (landings[:3], np.vstack([landings, landings[:1]]), landings[:0]):
        assert not landings_fit(geom, wrong, 16)
        with pytest.raises(NativeError, match="EINVAL"):
            chunks_land_at(geom, [address_of(payload)], [len(payload)], [0], wrong, 16)
    assert not landings_fit(geom, landings, 17)
    for addresses, sizes, firsts in (([1, 1], [1], [0]), ([1], [1, 1], [0]), ([1], [1], [0, 0])):
        with pytest.raises(NativeError, match="first cells"):
            chunks_land_at(geom, addresses, sizes, firsts, landings, 16)
    with pytest.raises(ValueError, match="contiguous"):
        landings_fit(geom, landings[::2], 16)

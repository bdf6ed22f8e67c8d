"""Geometry and engine blobs through the Python wrapper."""

from __future__ import annotations

import copy
import json
import pickle
import struct

import numpy as np
import pytest

from llmaas_plugins._native import (
    KVGeometry,
    NativeError,
    Status,
    blob_check,
    blob_init,
    blob_positions,
    blob_probe,
    blob_size,
    blob_sort,
)

GEOM = KVGeometry(2, False, 1, 1, (8, 4), (4, 2))
POSITIONS = [5, 6, 0]


def make_blob(geom=GEOM, positions=POSITIONS):
    blob = bytearray(blob_size(geom, len(positions)))
    blob_init(geom, blob, positions)
    return blob


def test_layout_is_the_engine_s():
    blob = make_blob()
    assert struct.unpack_from("<IiII", blob) == (0xAF143CD8, 0, 1, 3)
    assert [struct.unpack_from("<iIi", blob, 16 + 12 * i) for i in range(3)] == [
        (position, 1, 0) for position in POSITIONS
    ]
    assert struct.unpack_from("<II", blob, 52) == (0, 2)
    assert struct.unpack_from("<iQ", blob, 60) == (1, 8)
    assert struct.unpack_from("<iQ", blob, 60 + 12 + 24) == (1, 4)
    assert len(blob) == 60 + 4 * 12 + 3 * (8 + 4 + 4 + 2)


def test_transposed_layout_names_elements():
    blob = make_blob(KVGeometry(1, True, 1, 30, (8,), (6,)))
    assert struct.unpack_from("<iII", blob, 60 + 12 + 24) == (30, 2, 3)


@pytest.mark.parametrize("v_trans", [False, True])
@pytest.mark.parametrize("v_row", [(4, 2), (0, 0)])
def test_probe_inverts_init(v_trans, v_row):
    geom = KVGeometry(2, v_trans, 1, 1, (8, 4), v_row)
    blob = make_blob(geom)
    assert blob_probe(blob) == (geom, 3)
    assert blob_positions(memoryview(blob)) == POSITIONS
    blob_check(geom, blob, POSITIONS)


@pytest.mark.parametrize("v_trans", [False, True])
@pytest.mark.parametrize("n_first", [1, 2])
def test_two_caches_come_one_after_the_other(v_trans, n_first):
    geom = KVGeometry(3, v_trans, 1, 1, (8, 4, 6), (4, 2, 6), n_first)
    blob = make_blob(geom)
    head = struct.calcsize("<II") + 3 * struct.calcsize("<iIi") + struct.calcsize("<II")
    first = sum(
        2 * 12 + 3 * (k + v) for k, v in zip(geom.k_row[:n_first], geom.v_row, strict=False)
    )
    second = 8 + head + first
    assert blob[second : second + head - 4] == blob[8 : 8 + head - 4]  # the same cells
    assert struct.unpack_from("<I", blob, 8 + head - 4) == (n_first,)
    assert struct.unpack_from("<I", blob, second + head - 4) == (3 - n_first,)
    assert blob_probe(blob) == (geom, 3)
    assert geom.hash not in {KVGeometry(3, v_trans, 1, 1, (8, 4, 6), (4, 2, 6)).hash, GEOM.hash}
    blob_check(geom, blob, POSITIONS)
    blob[second + 8] ^= 1  # a cell at another position than in the first cache
    with pytest.raises(NativeError):
        blob_check(geom, blob, POSITIONS)
    with pytest.raises(NativeError):
        blob_probe(blob)


def test_a_layout_of_before_two_caches_is_one():
    values = GEOM.to_json()
    del values["n_first"]
    assert KVGeometry.from_json(values) == GEOM


def test_check_names_what_it_expected():
    blob = make_blob()
    with pytest.raises(NativeError, match=r"162 bytes for 3 cells, expected 162 bytes") as caught:
        blob_check(GEOM, blob, [5, 6, 1])
    assert caught.value.status is Status.ECORRUPT
    with pytest.raises(NativeError, match="expected 162 bytes"):
        blob_init(GEOM, bytearray(100), POSITIONS)
    with pytest.raises(NativeError, match="blob of 0 cells, expected at least 1"):
        blob_size(GEOM, 0)


@pytest.mark.parametrize("n", [0, 3, 15, 16, 40, 161])
def test_truncated_blobs_are_errors(n):
    with pytest.raises(NativeError) as caught:
        blob_probe(make_blob()[:n])
    assert caught.value.status is Status.ECORRUPT


def test_blobs_that_chunks_cannot_hold_are_unsupported():
    for offset, value in ((8, 2), (12, 0), (20, 2)):  # streams, cells, sequence ids of a cell
        blob = make_blob()
        struct.pack_into("<I", blob, offset, value)
        with pytest.raises(NativeError) as caught:
            blob_probe(blob)
        assert caught.value.status is Status.EUNSUPPORTED


def test_positions_of_foreign_bytes_are_an_error():
    for data in (b"", bytes(11), bytes(200)):
        with pytest.raises(NativeError):
            blob_positions(data)


@pytest.mark.parametrize("v_trans", [False, True])
def test_cells_are_sorted_by_position(v_trans):
    """Rows of K, and of V in both orders, move with their cells."""
    geom, n = KVGeometry(1, v_trans, 1, 1, (6,), (4,)), 40
    order = np.roll(np.arange(n), 8)  # the engine's order beside other contexts' cells
    k, v = np.random.default_rng(1).integers(0, 2**16, (2, n, 3)).astype(np.uint16)
    v = v[:, :2]

    def filled(positions):
        blob = make_blob(geom, positions.tolist())
        start = 16 + 12 * n + 8 + 12
        blob[start : start + 6 * n] = k[positions].tobytes()
        rows = v[positions].T if v_trans else v[positions]
        blob[start + 6 * n + 12 :] = rows.tobytes()
        return blob

    blob = filled(order)
    blob_sort(geom, blob, n)
    blob_check(geom, blob, range(n))
    assert blob == filled(np.arange(n))
    blob_sort(geom, blob, n)
    assert blob == filled(np.arange(n))


def test_only_the_layout_is_sorted():
    blob = make_blob()
    blob[20] ^= 2  # how many sequences the first cell belongs to
    before = bytes(blob)
    with pytest.raises(NativeError, match=r"162 bytes for 3 cells, expected 162") as caught:
        blob_sort(GEOM, blob, 3)
    assert caught.value.status is Status.ECORRUPT
    assert blob == before
    with pytest.raises(BufferError):
        blob_sort(GEOM, before, 3)
    with pytest.raises(NativeError, match="expected at least 1 cell"):
        blob_sort(GEOM, blob, 0)


def test_geometry_is_a_value():
    assert GEOM == copy.deepcopy(GEOM) == pickle.loads(pickle.dumps(GEOM))
    assert hash(GEOM) == hash(copy.copy(GEOM))
    assert KVGeometry.from_json(json.loads(json.dumps(GEOM.to_json()))) == GEOM
    assert GEOM.token_bytes == 18
    assert "handle" not in repr(GEOM)


@pytest.mark.parametrize(
    "values",
    [
        (0, False, 1, 1, (), ()),
        (1, False, 1, 1, (3,), (2,)),
        (1, False, 1, 1, (2**21,), (2,)),
        (1, False, 1, 1, (-2,), (2,)),
        (1, True, 8, 8, (34,), (34,)),
        (2, False, 1, 1, (2,), (2, 2)),
        (2, False, 1, 1, (2, 2), (2, 2), 2),
        (1, False, 2**40, 1, (2,), (2,)),
    ],
)
def test_bad_geometry_is_refused(values):
    with pytest.raises(NativeError) as caught:
        KVGeometry(*values)
    assert caught.value.status is Status.EINVAL


@pytest.mark.parametrize("values", [{}, {**GEOM.to_json(), "k_row": None}])
def test_bad_json_is_refused(values):
    with pytest.raises(NativeError, match="KV geometry from"):
        KVGeometry.from_json(values)

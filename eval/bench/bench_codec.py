"""Speed of the codecs alone on one core, compared with a copy of the engine's F16 bytes."""

from __future__ import annotations

import numpy as np
import pytest

from llmaas_eval.paired import compare
from llmaas_plugins import _native
from llmaas_plugins._native import Codec, KVGeometry, NativeError

CHUNK, N_CELLS = 16, 256
KEY = bytes(32)
ROUNDS = 30
KERNELS = ("generic", "avx2", "avx512")


@pytest.fixture(params=KERNELS)
def kernels(request):
    best = _native.kernels_name()
    try:
        _native.kernels_select(request.param)
    except NativeError as error:
        pytest.skip(str(error))
    yield request.param
    _native.kernels_select(best)


@pytest.fixture(params=[False, True], ids=["flash", "no-flash"])
def geometry(request):
    """Return the geometry of 16 layers with 8 KV heads of width 64.

    Without flash attention, V is transposed.
    """
    return KVGeometry(16, request.param, 1, 1, (1024,) * 16, (1024,) * 16)


PLANES = (8, 6, 5, 4, 3, 2)
CODECS = {
    "int8": (Codec.INT8, 8),
    "lossless": (Codec.LOSSLESS, 8),
    **{f"planes{bits}": (Codec.PLANES, bits) for bits in PLANES},
}


@pytest.fixture(params=CODECS)
def codec(request):
    """Return the codec and the number of bits that it keeps."""
    return CODECS[request.param]


def bench_decode(benchmark, kernels, geometry, codec):
    blob, chunks = encoded(geometry, codec)
    back = np.zeros_like(blob)
    firsts = list(range(0, N_CELLS, CHUNK))
    measure(
        benchmark,
        geometry,
        lambda: _native.chunks_decode(geometry, chunks, firsts, back, N_CELLS),
    )
    benchmark.extra_info["share"] = sum(map(len, chunks)) / (geometry.token_bytes * N_CELLS)


def bench_encode(benchmark, kernels, geometry, codec):
    blob = normal_blob(geometry)
    measure(benchmark, geometry, lambda: encode(geometry, codec, blob))


def measure(benchmark, geometry, code):
    """Measure GB/s of F16 bytes, against a plain copy of the same bytes in the same rounds."""
    source = normal_blob(geometry)
    copy = np.empty_like(source)
    compare(benchmark, code, lambda: np.copyto(copy, source), rounds=ROUNDS)
    figures, n_bytes = benchmark.extra_info, geometry.token_bytes * N_CELLS
    figures["gb_per_s"] = n_bytes / benchmark.stats.stats.median / 1e9


def encoded(geometry, codec):
    blob = normal_blob(geometry)
    return blob, encode(geometry, codec, blob)


def encode(geometry, codec, blob):
    codec, bits = codec
    room = _native.chunk_bound(geometry, codec, CHUNK, bits)
    out = np.empty((N_CELLS // CHUNK, room), np.uint8)
    chunks = []
    for part, first in zip(out, range(0, N_CELLS, CHUNK), strict=True):
        n = _native.chunk_encode(geometry, codec, blob, N_CELLS, first, CHUNK, KEY, part, bits)
        chunks.append(part[:n])
    return chunks


def normal_blob(geometry):
    n_bytes = _native.blob_size(geometry, N_CELLS)
    values = np.random.default_rng(0).normal(size=n_bytes // 2 + 1).astype(np.float16)
    blob = values.view(np.uint8)[:n_bytes]
    _native.blob_init(geometry, blob, range(N_CELLS))
    return blob

"""Micro-benchmark of the core: ``python native/tests/bench_native.py``.

GB/s count the engine's bytes (f16 rows), not the encoded ones. Every figure is the median of
several passes over one blob that is reused, as in service.
"""

# ruff: noqa: INP001
from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from llmaas_plugins import _native as nat

if TYPE_CHECKING:
    from collections.abc import Callable

KEY = bytes(32)
CHUNK = 16


def model_geometry(*, v_trans: bool, n_layer: int = 16, row: int = 1024) -> nat.KVGeometry:
    """Geometry of a 1 B-class model: 16 layers, 8 KV heads of 64."""
    return nat.KVGeometry(n_layer, v_trans, 1, 1, (row,) * n_layer, (row,) * n_layer)


def gaussian_blob(geom: nat.KVGeometry, n_cells: int) -> np.ndarray:
    """A blob of normally distributed f16 rows, each channel with its own scale."""
    rng = np.random.default_rng(0)
    blob = rng.normal(size=nat.blob_size(geom, n_cells) // 2 + 1).astype(np.float16)
    view = blob.view(np.uint8)[: nat.blob_size(geom, n_cells)]
    nat.blob_init(geom, view, range(n_cells))
    return view


def seconds(call: Callable[[], object], n: int = 25) -> float:
    """Median time of a call after a few warm-up calls."""
    times = []
    for _ in range(n + 3):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times[3:])


def encode_all(
    geom: nat.KVGeometry, codec: nat.Codec, blob: np.ndarray, n_cells: int, out: np.ndarray
) -> list[np.ndarray]:
    """Encode every chunk of a blob into slices of ``out``."""
    room = nat.chunk_bound(geom, codec, CHUNK)
    chunks = []
    for first in range(0, n_cells, CHUNK):
        part = out[first // CHUNK * room :][:room]
        n = nat.chunk_encode(geom, codec, blob, n_cells, first, CHUNK, KEY, part)
        chunks.append(part[:n])
    return chunks


def bench_codec(codec: nat.Codec, *, v_trans: bool, n_cells: int = 256) -> dict[str, float]:
    """Encode and decode speed in GB/s of f16, and the payload's share of the raw bytes."""
    geom = model_geometry(v_trans=v_trans)
    blob = gaussian_blob(geom, n_cells)
    n_bytes = geom.token_bytes * n_cells
    out = np.zeros(nat.chunk_bound(geom, codec, CHUNK) * (n_cells // CHUNK), np.uint8)
    chunks = encode_all(geom, codec, blob, n_cells, out)
    firsts = list(range(0, n_cells, CHUNK))
    back = np.zeros_like(blob)
    encode = seconds(lambda: encode_all(geom, codec, blob, n_cells, out))
    decode = seconds(lambda: nat.chunks_decode(geom, chunks, firsts, back, n_cells))
    verify = seconds(lambda: [nat.chunk_verify(chunk, KEY) for chunk in chunks])
    size = sum(len(chunk) for chunk in chunks)
    return {
        "encode": n_bytes / encode / 1e9,
        "decode": n_bytes / decode / 1e9,
        "verify": size / verify / 1e9,
        "ratio": size / n_bytes,
    }


def bench_call_overhead() -> float:
    """Microseconds of one chunks_decode call of 50 tiny chunks."""
    geom = model_geometry(v_trans=False, n_layer=1, row=2)
    blob = gaussian_blob(geom, 800)
    out = np.zeros(50 * nat.chunk_bound(geom, nat.Codec.RAW, CHUNK), np.uint8)
    chunks = encode_all(geom, nat.Codec.RAW, blob, 800, out)
    firsts = list(range(0, 800, CHUNK))
    return seconds(lambda: nat.chunks_decode(geom, chunks, firsts, blob, 800), 200) * 1e6


def bench_cold_read(folder: str, n_chunks: int = 128, *, warm: bool = False) -> float:
    """MB/s of reading INT8 chunks from a file whose pages were dropped (or not: ``warm``)."""
    geom = model_geometry(v_trans=False)
    blob = gaussian_blob(geom, CHUNK)
    out = np.zeros(nat.chunk_bound(geom, nat.Codec.INT8, CHUNK), np.uint8)
    payload = encode_all(geom, nat.Codec.INT8, blob, CHUNK, out)[0]
    room = -(-len(payload) // nat.STORE_BLOCK) * nat.STORE_BLOCK
    offsets = [i * room for i in range(n_chunks)]
    lengths = [len(payload)] * n_chunks
    target = np.ones(n_chunks * room, np.uint8)  # touched: no page faults in the figure
    addresses = [target.ctypes.data + offset for offset in offsets]
    path = Path(folder) / "bench.slab"
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        nat.store_write(fd, offsets, lengths, [payload] * n_chunks)
        os.fsync(fd)
        if not warm:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        start = time.perf_counter()
        statuses = nat.store_read(fd, offsets, lengths, addresses, [KEY] * n_chunks)
        elapsed = time.perf_counter() - start
        assert set(statuses) == {nat.Status.OK}
    finally:
        os.close(fd)
        path.unlink()
    return n_chunks * room / elapsed / 1e6


def main(folder: str | None = None) -> None:
    """Print every figure for every kernel that this CPU has."""
    best = nat.kernels_name()
    for name in ("generic", "avx2", "avx512"):
        try:
            nat.kernels_select(name)
        except nat.NativeError:
            continue
        for codec in nat.Codec:
            for v_trans in (False, True):
                row = bench_codec(codec, v_trans=v_trans)
                figures = "  ".join(f"{key} {value:6.2f}" for key, value in row.items())
                print(f"{name:8} {codec.name:9} v_trans={v_trans:d}  {figures}")  # noqa: T201
    nat.kernels_select(best)
    print(f"call of 50 chunks: {bench_call_overhead():.1f} us")  # noqa: T201
    with tempfile.TemporaryDirectory(dir=folder) as place:
        cold = sorted(bench_cold_read(place) for _ in range(5))
        warm = sorted(bench_cold_read(place, warm=True) for _ in range(5))
    print(f"store_read: cold {cold[2]:.0f} MB/s, cached {warm[2]:.0f} MB/s")  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:2])

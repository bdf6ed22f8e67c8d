"""Cost of a token's search and mixing by the size of the datastore, with keys of 8 B models.

Keys have 4,096 numbers, of which 128 directions are scanned, and a vocabulary has 128,256 tokens.
The 100 nearest pairs are rescored with their keys from the file, which the page cache may hold. A
token of the model is not computed: its time is that of reading the weights of 8 B in Q4_0 once, as
fast as two threads read memory. So the printed share is the largest possible one.

A datastore of 1e6 pairs needs 17 GB of disk: its keys are kept twice while it is written.
"""

from __future__ import annotations

import functools
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest

from llmaas_eval.knn.synthetic import clustered
from llmaas_eval.paired import repeats
from llmaas_eval.stats import quartiles
from llmaas_plugins._native import logits_mix, logits_peek
from llmaas_plugins.flash_weights.memory_bandwidth import memory_rate
from llmaas_plugins.knn_lm.datastore.datastore import Datastore
from llmaas_plugins.knn_lm.datastore.pca import fit_basis

N_PAIRS = (1_000, 10_000, 100_000, 1_000_000)
N_EMBD, N_VOCAB, N_DIMS, K = 4096, 128_256, 128, 100
N_SAMPLE, N_TOKENS, N_WARM = 20_000, 64, 4
MODEL = bytes(32)
WEIGHT_BYTES = 4_661_000_000
"""Bytes of the weights that a token of Llama 3 8B reads in Q4_0."""
MIXTURE = {"alpha": 0.3, "beta": 0.5, "theta": 400.0, "far": 4000.0}


@pytest.fixture(scope="module", params=N_PAIRS, ids=lambda n: f"{n:.0e}")
def store(request, bench_dir):
    """Return the number of pairs, and the open datastore with them."""
    n_bytes = 2 * 2 * N_EMBD * request.param
    if shutil.disk_usage(bench_dir).free < 1.1 * n_bytes:
        pytest.skip(f"{request.param} pairs need {n_bytes / 1e9:.0f} GB of disk")
    with tempfile.TemporaryDirectory(dir=bench_dir) as folder:
        path = Path(folder) / "datastore.knn"
        write(path, request.param)
        opened = Datastore.open(path, MODEL)
        yield request.param, opened
        opened.close()


@functools.cache
def basis():
    """Return the directions to scan in, which take a minute to find."""
    sample = np.concatenate([*clustered(N_SAMPLE, N_EMBD)])
    return fit_basis(sample.astype(np.float16), N_DIMS)


def write(path, n_pairs):
    """Write the datastore; its keys are on disk meanwhile, not in memory."""
    keys = np.memmap(path.with_suffix(".keys"), np.float16, "w+", shape=(n_pairs, N_EMBD))
    start = 0
    for part in clustered(n_pairs, N_EMBD):
        keys[start : start + len(part)] = part
        start += len(part)
    Datastore.write(
        path,
        fingerprint=MODEL,
        keys=keys,
        values=np.random.default_rng(1).integers(0, N_VOCAB, n_pairs).astype(np.int32),
        origins=np.zeros((n_pairs, 2), np.int32),
        conversations=["one"],
        basis=basis(),
        settings={},
    )
    del keys
    path.with_suffix(".keys").unlink()


def bench_token(benchmark, store):
    """Measure searching and mixing, one token after another."""
    n_pairs, datastore = store
    queries = iter(np.concatenate([*clustered(N_TOKENS + N_WARM, N_EMBD, seed=2)]))
    rng, taken = np.random.default_rng(3), []
    model = (4 * rng.standard_normal(N_VOCAB)).astype(np.float32)

    def token():
        logits, query = model.copy(), next(queries)
        started = time.perf_counter()
        logits_peek(logits)
        found = datastore.search(query, K)
        searched = time.perf_counter()
        distances = found.distances - MIXTURE["theta"] * np.log(found.weights)
        logits_mix(logits, found.values, distances.astype(np.float32), **MIXTURE)
        taken.append((searched - started, time.perf_counter() - searched))

    benchmark.pedantic(token, rounds=repeats(N_TOKENS), warmup_rounds=N_WARM)
    search_s, mix_s = np.array(taken[N_WARM:]).T
    token_s = WEIGHT_BYTES / memory_rate(2)
    benchmark.extra_info.update(
        n_pairs=n_pairs,
        search_ms=quartiles(1e3 * search_s),
        mix_ms=quartiles(1e3 * mix_s),
        token_ms=1e3 * token_s,
        share=float(np.median(search_s + mix_s) / (token_s + np.median(search_s + mix_s))),
        memory_mb=datastore.memory_bytes / 1e6,
        keys_gb=2 * N_EMBD * n_pairs / 1e9,
    )

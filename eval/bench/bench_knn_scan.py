"""Speed of nearest-neighbor search on one core, ours against NumPy and faiss, and its memory.

There are 1e5 keys of 2,048 numbers, of two kinds. In ``normal`` keys all directions have equal
variance, so a basis does not help. In ``clustered`` keys the variance differs as in hidden states.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

from llmaas_eval.paired import compare
from llmaas_plugins.knn_lm.datastore.datastore import Datastore
from llmaas_plugins.knn_lm.datastore.pca import fit_basis

N_KEYS, N_EMBD, K = 100_000, 2048, 100
N_QUERIES = 40
ROUNDS = 40
RECALL = 0.99
MODEL = bytes(32)
N_DIMS = {"whole": None, "pca256": 256}
MOST_MB = {"whole": 260, "pca256": 100}


@pytest.fixture(scope="module")
def faiss():
    return pytest.importorskip("faiss", reason="pip install faiss-cpu")


@pytest.fixture(scope="module", autouse=True)
def _one_core(faiss):
    limits = pytest.importorskip("threadpoolctl", reason="pip install threadpoolctl")
    faiss.omp_set_num_threads(1)
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(allowed)})
    with limits.threadpool_limits(1):
        yield
    os.sched_setaffinity(0, allowed)


@pytest.fixture(scope="module", params=["normal", "clustered"])
def keys(request):
    """Return the kind of keys, the keys, and queries; float32 values that float16 can hold."""
    return request.param, *make_keys(request.param)


def make_keys(kind):
    rng = np.random.default_rng(0)
    points = rng.standard_normal((N_KEYS + N_QUERIES, N_EMBD), dtype=np.float32)
    if kind == "clustered":
        spread = (1 + np.arange(N_EMBD, dtype=np.float32)) ** -0.8
        points *= 0.6
        points += rng.standard_normal((500, N_EMBD), dtype=np.float32)[
            rng.integers(0, 500, len(points))
        ]
        points *= spread
        rotation = np.linalg.qr(rng.standard_normal((N_EMBD, N_EMBD), dtype=np.float32))[0]
        points = points @ rotation
    points = points.astype(np.float16).astype(np.float32)
    return points[:N_KEYS], points[N_KEYS:]


class Numpy:
    """Exact search as one would write it in NumPy: a matrix product and a partial sort."""

    def __init__(self, points):
        self.points, self.sizes = points, np.einsum("ij,ij->i", points, points)

    def __call__(self, query):
        distances = self.sizes - 2 * (self.points @ query)
        return np.argpartition(distances, K)[:K]


class Faiss:
    def __init__(self, index, points, **search):
        self.index, self.search = index, search
        index.train(points)
        index.add(points)

    def __call__(self, query):
        return self.index.search(query[None], K, **self.search)[1][0]


def faiss_sq8(faiss, points, queries, nearest):
    """Build one-byte codes, with the fewest exact distances that reach the recall."""
    base = faiss.IndexScalarQuantizer(N_EMBD, faiss.ScalarQuantizer.QT_8bit, faiss.METRIC_L2)
    index = faiss.IndexRefineFlat(base)
    index.train(points)
    index.add(points)
    for factor in (1, 1.1, 1.2, 1.5, 2, 3, 5):
        index.k_factor = factor
        search = lambda query: index.search(query[None], K)[1][0]  # noqa: E731
        if recall_of(search, queries, nearest) >= RECALL:
            break
    return base, search


def recall_of(search, queries, nearest):
    hits = [
        len(np.intersect1d(search(query), rows))
        for query, rows in zip(queries, nearest, strict=True)
    ]
    return np.mean(hits) / K


@contextlib.contextmanager
def written(points, n_dims):
    """Write the datastore to a temporary file, in memory or on disk depending on the system."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "datastore.knn"
        write(path, points, n_dims)
        yield path


def write(path, points, n_dims):
    n = len(points)
    Datastore.write(
        path,
        fingerprint=MODEL,
        keys=points,
        values=np.zeros(n, np.int32),
        origins=np.zeros((n, 2), np.int32),
        conversations=["one"],
        basis=n_dims and fit_basis(points, n_dims),
        settings={},
    )


@pytest.mark.parametrize("form", N_DIMS)
@pytest.mark.parametrize("rival", ["numpy", "faiss-flat", "faiss-sq8"])
def bench_search(benchmark, faiss, keys, form, rival):
    """Compare our search, which rescores with keys from the file, with the rival's, in turn."""
    kind, points, queries = keys
    if kind == "normal" and form != "whole":
        pytest.skip("all directions have equal variance, so a basis does not help")
    exact = Numpy(points)
    nearest = [exact(query) for query in queries]
    search = exact
    if rival == "faiss-flat":
        search = Faiss(faiss.IndexFlatL2(N_EMBD), points)
    elif rival == "faiss-sq8":
        _, search = faiss_sq8(faiss, points, queries, nearest)
    with written(points, N_DIMS[form]) as path:
        store = Datastore.open(path, MODEL)
        measure(benchmark, lambda query: store.search(query, K).rows, search, queries, nearest)
        store.close()
    assert benchmark.extra_info["recall"] >= RECALL


def measure(benchmark, ours, rival, queries, nearest):
    turns = {"ours": iter(range(10**9)), "rival": iter(range(10**9))}

    def step(name, search):
        return lambda: search(queries[next(turns[name]) % len(queries)])

    compare(benchmark, step("ours", ours), step("rival", rival), rounds=ROUNDS)
    figures = benchmark.extra_info
    figures["recall"] = recall_of(ours, queries, nearest)
    figures["rival_recall"] = recall_of(rival, queries, nearest)
    figures["ratio"] = 1 / figures["speedup"]
    del figures["peak_rss_mib"]  # it is the peak of all searches in this process


@pytest.mark.parametrize("form", N_DIMS)
def bench_memory(benchmark, form):
    """Measure the memory of a process that only opens the datastore and searches it."""
    points, queries = make_keys("clustered")
    with written(points, N_DIMS[form]) as path:
        np.save(path.with_suffix(".npy"), queries)
        del points
        command = [sys.executable, "-c", PROCESS, str(path)]
        out = benchmark.pedantic(subprocess.check_output, (command,), rounds=1)
    rss_mb, mapped_mb = map(float, out.split())
    benchmark.extra_info.update(rss_mb=rss_mb, data_mapped_mb=mapped_mb)
    assert rss_mb + mapped_mb <= MOST_MB[form]


PROCESS = """
import re, sys
from pathlib import Path
import numpy as np
from llmaas_plugins.knn_lm.datastore.datastore import Datastore

path = Path(sys.argv[1])
store = Datastore.open(path, bytes(32))
for query in np.load(path.with_suffix(".npy")):
    store.search(query, 100)
status = Path("/proc/self/status").read_text()
maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(path) in line]
mapped = sum(int(line.split("-")[1].split()[0], 16) - int(line.split("-")[0], 16) for line in maps)
print(int(re.search(r"VmHWM:\\s+(\\d+)", status)[1]) * 1024 / 1e6, mapped / 1e6)
"""

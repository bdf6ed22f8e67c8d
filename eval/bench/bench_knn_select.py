"""Time to select 1e5 pairs: Algorithm 1 by archive size, Algorithm 2 per 1,000 pairs.

The archive is on disk. Its keys are 2,048 float16 numbers in clusters; its values are as frequent
as words. It is the largest file of all benchmarks (1.7 GB for 4e5 pairs) and is made once.
"""

from __future__ import annotations

import time

import numpy as np
import pytest

from llmaas_eval.paired import repeats
from llmaas_plugins.chats.exports import Conversation, Message
from llmaas_plugins.knn_lm.archive.archive import Archive
from llmaas_plugins.knn_lm.archive.pairs import Pairs
from llmaas_plugins.knn_lm.archive.record import Record
from llmaas_plugins.knn_lm.archive.segments import Binding
from llmaas_plugins.knn_lm.build.archive_source import (
    SelectionParams,
    archive_source,
    initial_objective,
)
from llmaas_plugins.knn_lm.build.build_datastore import build_datastore
from llmaas_plugins.knn_lm.selection.algorithms import Online, offline
from llmaas_plugins.machine import peak_bytes

SIZE, N_EMBD, N_VOCAB = 100_000, 2048, 32_000
N_FULL = (150_000, 250_000, 400_000)
N_A_CONVERSATION = 1000
BINDING = Binding(bytes(32), N_EMBD, "ffn_input")


@pytest.fixture(scope="module")
def archive(bench_dir):
    directory = bench_dir / f"archive-{N_FULL[-1]}x{N_EMBD}"
    with Archive.open(directory, BINDING, writable=True) as archive:
        fill(archive)
        yield archive


def fill(archive):
    """Append conversations until the archive has enough pairs."""
    rng = np.random.default_rng(0)
    centers = rng.standard_normal((N_VOCAB // 8, N_EMBD), dtype=np.float32)
    spread = 4 * (1 + np.arange(N_EMBD, dtype=np.float32)) ** -0.6
    frequency = 1 / (10 + np.arange(N_VOCAB))
    for i in range(N_FULL[-1] // N_A_CONVERSATION):
        tokens = rng.choice(N_VOCAB, N_A_CONVERSATION + 1, p=frequency / frequency.sum())
        noise = rng.standard_normal((N_A_CONVERSATION, N_EMBD), dtype=np.float32)
        if i < len(archive):
            continue
        keys = (centers[tokens[1:] // 8] + 0.7 * noise) * spread
        p_lm = rng.beta(0.5, 1.5, N_A_CONVERSATION).astype(np.float32).clip(1e-5, 1)
        pairs = Pairs(keys.astype(np.float16), tokens[1:].astype(np.int32), p_lm, p_lm)
        positions = np.arange(1, N_A_CONVERSATION + 1, dtype=np.int32)
        talk = Conversation(f"conversation {i}", "bench", (Message("user", str(i)),))
        archive.append(Record(talk, "bench", 0.0, tokens.astype(np.int32), positions, pairs))


class First:
    """A source's first ``n`` pairs."""

    def __init__(self, source, n):
        self.values, self.p_lm, self.n_dims = source.values[:n], source.p_lm[:n], source.n_dims
        self.keys = source.keys


@pytest.mark.parametrize("n_full", N_FULL)
def bench_offline(benchmark, archive, n_full):
    """Measure Algorithm 1: 1e5 pairs out of ``n_full``."""
    source = archive_source(archive, SelectionParams())
    objective = initial_objective(source, 0)
    chosen = benchmark.pedantic(
        lambda: offline(First(source, n_full), SIZE, objective), rounds=repeats(3)
    )
    assert len(chosen) == SIZE
    benchmark.extra_info["peak_rss_mib"] = peak_mib()


def bench_select(benchmark, archive):
    """Measure all of `llmaas datastore select`: basis, selection, fitting and writing the file."""
    report = benchmark.pedantic(
        lambda: build_datastore(archive, SelectionParams()), rounds=repeats(2)
    )
    assert report.n_pairs == SIZE
    benchmark.extra_info["peak_rss_mib"] = peak_mib()


def bench_online(benchmark, archive):
    """Measure Algorithm 2 over the stream: seconds per 1,000 pairs, mean and slowest buffer."""
    source = archive_source(archive, SelectionParams())
    online = Online(source, SIZE, initial_objective(source, 0))
    seconds = []

    def stream():
        started = time.perf_counter()
        for n in online.advance(len(source.values)):
            now = time.perf_counter()
            seconds.append((now - started) / n * 1000)
            started = now

    benchmark.pedantic(stream, rounds=1)
    benchmark.extra_info.update(
        mean_s_per_1000=float(np.mean(seconds)),
        slowest_s_per_1000=max(seconds),
        selected=len(online.best()),
        peak_rss_mib=peak_mib(),
    )


def peak_mib():
    return peak_bytes() / (1 << 20)

"""Time to select 1e5 pairs: Algorithm 1 by archive size, Algorithm 2 per 1,000 pairs.

``bench_designs`` compares both with merging, with 0.3 of the pairs kept (Fig 8). The time of
merging grows with the square of the pairs, so these are fewer.

The archive is on disk. Its keys are 2,048 float16 numbers in clusters; its values are as frequent
as words. It is the largest file of all benchmarks (1.7 GB for 4e5 pairs) and is made once.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time

import numpy as np
import pytest

from llmaas_eval.knn.costs import DESIGNS, FirstPairs
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
N_COMPARED = (10_000, 20_000, 40_000)
N_A_CONVERSATION = 1000
BINDING = Binding(bytes(32), N_EMBD, "ffn_input")


@pytest.fixture(scope="module")
def archive(bench_dir):
    with filled(bench_dir, N_FULL[-1]) as archive:
        yield archive


@pytest.fixture(scope="module")
def small_archive(bench_dir):
    """Return the folder of an archive that other processes read."""
    with filled(bench_dir, N_COMPARED[-1]) as archive:
        return archive.directory


@contextlib.contextmanager
def filled(bench_dir, n_pairs):
    """Open an archive of synthetic pairs, which is made once."""
    directory = bench_dir / f"archive-{n_pairs}x{N_EMBD}"
    with Archive.open(directory, BINDING, writable=True) as archive:
        fill(archive, n_pairs)
        yield archive


def fill(archive, n_pairs):
    """Append conversations until the archive has enough pairs."""
    rng = np.random.default_rng(0)
    centers = rng.standard_normal((N_VOCAB // 8, N_EMBD), dtype=np.float32)
    spread = 4 * (1 + np.arange(N_EMBD, dtype=np.float32)) ** -0.6
    frequency = 1 / (10 + np.arange(N_VOCAB))
    for i in range(n_pairs // N_A_CONVERSATION):
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


@pytest.mark.parametrize("n_full", N_FULL)
def bench_offline(benchmark, archive, n_full):
    """Measure Algorithm 1: 1e5 pairs out of ``n_full``."""
    source = archive_source(archive, SelectionParams())
    objective = initial_objective(source, 0)
    chosen = benchmark.pedantic(
        lambda: offline(FirstPairs(source, n_full), SIZE, objective), rounds=repeats(3)
    )
    assert len(chosen) == SIZE
    benchmark.extra_info["peak_rss_mib"] = peak_mib()


@pytest.mark.parametrize("n_full", N_COMPARED)
@pytest.mark.parametrize("design", DESIGNS)
def bench_designs(benchmark, small_archive, design, n_full):
    """Measure a design's time and peak memory in its own process."""
    command = [sys.executable, "-m", "llmaas_eval.knn.costs", str(small_archive)]
    command += [design, str(n_full)]
    lines = []
    benchmark.pedantic(lambda: lines.append(subprocess.check_output(command)), rounds=repeats(3))
    found = [json.loads(line) for line in lines]
    benchmark.extra_info.update(
        seconds=float(np.median([each["seconds"] for each in found])),
        kept=found[0]["kept"],
        more_mib=max(each["more_bytes"] for each in found) / (1 << 20),
    )


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

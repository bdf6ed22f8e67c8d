"""What mixing costs: tokens a second of a 1 B-shape model by the size of the datastore (Figs 4, 7).

1e5 pairs is what is selected, 4e5 a user's full datastore.

Ours is the plugin with 128 directions, 100 neighbours and *every* token searched: a model of random
weights is never sure, and without looking back the datastore is always trusted. Looking back, as by
default, a prompt is judged by 64 searches, and the datastore, of noise, is not trusted after that.
Vanilla is stock llama-cpp-python in a process without the suite. Both generate in turn; figures are
over several pairs of processes.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest

from llmaas_eval.inference import App, Lengths
from llmaas_eval.paired import quartiles, repeats
from llmaas_plugins.demo.interval import median_interval
from llmaas_plugins.knn_lm.archive_files import SELECTED
from llmaas_plugins.knn_lm.datastore import Datastore
from llmaas_plugins.knn_lm.fingerprint import fingerprint
from llmaas_plugins.knn_lm.pca import fit_basis

N_PAIRS = (100_000, 400_000)
N_DIMS, N_CLUSTERS, N_A_PART = 128, 500, 20_000
LENGTHS = Lengths(n_prompt=64, n_tokens=64, n_turns=1)
N_LIVES, N_ROUNDS = 5, 3
SETTINGS = {
    "mixture": {"alpha": 0.3, "beta": 0.5, "theta": 400.0, "far": 4000.0},
    "skip_above": 1.0,
    "key": "ffn_input",
}


@pytest.fixture(scope="module", params=N_PAIRS)
def store(model_1b, bench_dir, request):
    with tempfile.TemporaryDirectory(dir=bench_dir) as folder:
        write_store(Path(folder) / SELECTED, model_1b, request.param)
        yield Path(folder)


def write_store(path, model, n_pairs):
    """A datastore of clustered keys as wide as the model's, and of its tokens."""
    from llama_cpp import Llama

    llama = Llama(str(model), n_ctx=64, verbose=False)
    name, n_embd, n_vocab = fingerprint(llama), llama.n_embd(), llama.n_vocab()
    llama.close()
    rng = np.random.default_rng(0)
    spread = (1 + np.arange(n_embd, dtype=np.float32)) ** -0.8  # as hidden states differ, about
    centres = rng.standard_normal((N_CLUSTERS, n_embd), dtype=np.float32)
    keys = np.empty((n_pairs, n_embd), np.float16)
    for rows in np.array_split(keys, -(-n_pairs // N_A_PART)):
        noise = rng.standard_normal(rows.shape, dtype=np.float32)
        rows[:] = (centres[rng.integers(0, N_CLUSTERS, len(rows))] + 0.6 * noise) * spread
    Datastore.write(
        path,
        fingerprint=name,
        keys=keys,
        values=rng.integers(0, n_vocab, n_pairs).astype(np.int32),
        origins=np.zeros((n_pairs, 2), np.int32),
        conversations=["one"],
        basis=fit_basis(keys, N_DIMS),
        settings=SETTINGS,
    )


@pytest.mark.parametrize("look_back", [0, 64])
def bench_decode(benchmark, model_1b, store, look_back):
    """The first token, tokens one by one, and what the process takes more of memory."""
    lives, table = [], {"store": str(store), "look_back": look_back}

    def life():
        lives.append(pair(model_1b, table, len(lives)))

    benchmark.pedantic(life, rounds=repeats(N_LIVES))
    seconds, peaks, mixed = (np.array(each) for each in zip(*lives, strict=True))
    firsts, decodes = np.median(seconds, axis=1).transpose(1, 2, 0)
    ours, vanilla = decodes / LENGTHS.n_tokens
    speed, low, high = median_interval(vanilla / ours)
    more_mib = np.median(peaks[:, 0] - peaks[:, 1]) / (1 << 20)
    benchmark.extra_info.update(
        speed=speed,
        speed_low=low,
        speed_high=high,
        ours_ms=quartiles(1e3 * ours),
        vanilla_ms=quartiles(1e3 * vanilla),
        ours_first_ms=quartiles(1e3 * firsts[0]),
        vanilla_first_ms=quartiles(1e3 * firsts[1]),
        more_mib=float(more_mib),
    )
    assert (mixed > 0).all() or look_back


def pair(model, table, life):
    """Seconds of one pair of processes, ``(n_rounds, 2, 2)``; their peaks; tokens mixed."""
    config = {"on_error": "raise", "plugins": {"knn_lm": table}}
    with App(model, LENGTHS, config) as ours, App(model, LENGTHS, None) as vanilla:
        apps, taken = [ours, vanilla], []
        for i in range(repeats(N_ROUNDS) + 1):  # one to warm up
            order = apps if (life + i) % 2 else apps[::-1]
            done = {app: app.work(1000 * life + i) for app in order}
            both = [done[app] for app in apps]
            taken.append([[one.prefill_s for one in both], [one.decode_s for one in both]])
        mixed = ours.status()["plugins"]["knn_lm"]["mixed"]
        return taken[1:], [app.peak_bytes() for app in apps], mixed

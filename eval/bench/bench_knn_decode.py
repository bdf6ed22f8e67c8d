"""Cost of mixing: speed of a 1 B-shape model by the size of the datastore (Figs 4, 7).

1e5 pairs is the size of a selection, 4e5 that of a user's full datastore.

Ours is the plugin with 128 directions and 100 neighbors. With ``look_back`` 0 it searches for
*every* token, because a random-weight model is never sure and the datastore is always trusted. With
the default ``look_back``, 64 searches judge the prompt. This datastore is noise, so it is not
trusted after them. Vanilla is stock llama-cpp-python in a process without the suite. Both generate
in turn; the figures are over several pairs of processes.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest

from llmaas_eval.inference import App, Lengths
from llmaas_eval.knn.synthetic import clustered
from llmaas_eval.paired import repeats
from llmaas_eval.stats import median_interval, quartiles
from llmaas_plugins.knn_lm.archive.files import SELECTED
from llmaas_plugins.knn_lm.archive.fingerprint import fingerprint
from llmaas_plugins.knn_lm.datastore.datastore import Datastore
from llmaas_plugins.knn_lm.datastore.pca import fit_basis

N_PAIRS = (100_000, 400_000)
N_DIMS = 128
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
    """Write a datastore of clustered keys of the model's width, and of random tokens."""
    from llama_cpp import Llama

    llama = Llama(str(model), n_ctx=64, verbose=False)
    name, n_embd, n_vocab = fingerprint(llama), llama.n_embd(), llama.n_vocab()
    llama.close()
    keys = np.concatenate([part.astype(np.float16) for part in clustered(n_pairs, n_embd)])
    rng = np.random.default_rng(0)
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
    """Measure the first token, later tokens, and the additional memory of the process."""
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
    """Run one pair of processes, ours and vanilla.

    Return seconds of the first and of the later tokens, both peaks in bytes, and the number of
    mixed tokens. The seconds have shape ``(n_rounds, 2, 2)``; the last axis is the process.
    """
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

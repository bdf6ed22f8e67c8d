"""Cost of ``kv_chunks`` for an app that never switches contexts: generating and chatting.

The plugin has its defaults: it samples attention, saves new chunks after each reply, and may
recompute chunks while it loads others. Vanilla is stock llama-cpp-python in a process without the
suite. Both do the same work in turn, alternating which goes first.

A process's memory layout changes its speed by 1 to 2 % for its whole life. So there are several
pairs of processes, and each gives the median of its rounds. The figures are medians over the pairs:
tokens per second (for conversations: reply tokens), and the ratio to vanilla with its 95 %
interval.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest

from llmaas_eval.inference import App, Lengths
from llmaas_eval.paired import repeats
from llmaas_eval.stats import median_interval, quartiles

LENGTHS = Lengths()
N_LIVES = 8
N_ROUNDS = {"reference_model": 6, "model_200m": 3, "model_1b": 2}
PARTS = ("prefill", "decode", "chat")


@pytest.mark.parametrize("model", N_ROUNDS)
def bench_app(request, benchmark, bench_dir, model):
    """Measure tokens per second of prompts, replies and conversations, and peak memory."""
    path, lives = request.getfixturevalue(model), []

    def life():
        with tempfile.TemporaryDirectory(dir=bench_dir) as folder:
            lives.append(pair(path, Path(folder), repeats(N_ROUNDS[model]), len(lives)))

    benchmark.pedantic(life, rounds=repeats(N_LIVES))
    seconds, peaks = (np.array(each) for each in zip(*lives, strict=True))
    ours, vanilla = np.median(peaks, axis=0) / (1 << 20)
    benchmark.extra_info.update(
        **figures(np.median(seconds, axis=1)), ours_peak_mib=ours, vanilla_peak_mib=vanilla
    )


def pair(path, folder, n_rounds, life):
    """Run one pair of processes, ours and vanilla.

    Return seconds per token, shape ``(n_rounds, 2, n_parts)``, and both peaks in bytes.
    """
    config = {"on_error": "raise", "plugins": {"kv_chunks": {"store": str(folder / "kv")}}}
    with App(path, LENGTHS, config) as ours, App(path, LENGTHS, None) as vanilla:
        apps, taken = [ours, vanilla], []
        for i in range(n_rounds + 1):  # one to warm up
            order = apps if (life + i) % 2 else apps[::-1]
            done = {app: app.work(1000 * life + i) for app in order}
            assert done[ours].tokens == done[vanilla].tokens
            taken.append([token_seconds(done[app]) for app in apps])
        return taken[1:], [app.peak_bytes() for app in apps]


def token_seconds(taken):
    """Return seconds per token of the parts prefill, decode and chat.

    Chat is the time of whole conversations per reply token.
    """
    return (
        taken.prefill_s / LENGTHS.n_prompt,
        taken.decode_s / LENGTHS.n_tokens,
        taken.chat_s / taken.n_replied,
    )


def figures(seconds):
    """Return the figures from the pairs' medians, shape ``(n_lives, 2, n_parts)``."""
    found = {}
    for i, part in enumerate(PARTS):
        ours, vanilla = seconds[:, :, i].T
        median, low, high = median_interval(vanilla / ours)
        found |= {f"{part}_speed": median, f"{part}_low": low, f"{part}_high": high}
        found |= {f"ours_{part}": quartiles(1 / ours), f"vanilla_{part}": quartiles(1 / vanilla)}
    return found

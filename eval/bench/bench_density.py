"""Quality and cost of sampled attention densities, which order chunks by importance.

The texts are the packaged conversations, or the texts that ``LLMAAS_BENCH_TEXTS`` names: a text
file, a chat export, or a folder of such files.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import numpy as np
import pytest

from llmaas_eval.batches import batches, loaded
from llmaas_eval.paired import compare
from llmaas_eval.quality import conversation_texts
from llmaas_hooks import hookimpl
from llmaas_plugins import activate
from llmaas_plugins.chats.exports import load_conversations
from llmaas_plugins.kv_chunks.compression.attention import ROW_STEP
from llmaas_plugins.kv_chunks.store.chunk_ids import CHUNK_TOKENS
from llmaas_plugins.reference_model import reference_model_path

N_CONTEXTS = 40
TEXT_CHARACTERS = 20_000  # most characters read from a file
LENGTHS = {"short": (100, 200), "long": (400, 1000)}
TURN, ANSWER = (20, 120), 15
STEPS = ((1, 1), (4, 1), (8, 1), (16, 1), (32, 1), (1, 2), (8, 2), (1, 4))
ROUNDS = {"200m": 30, "1b": 12}
N_PREFILL = 512


class Native:
    """Plugin that keeps the native context."""

    def __init__(self):
        self.context = None

    @hookimpl
    def llmaas_native_context(self, context):
        self.context = context


@pytest.mark.parametrize("turns", [False, True], ids=["at once", "in turns"])
@pytest.mark.parametrize("length", LENGTHS)
def bench_order(benchmark, length, turns):
    """Measure Spearman's rank correlation of sampled and exact densities of 16-token chunks.

    The first figure is over all chunks of all contexts, because the plugin chooses compression
    levels among all of them. The figures in parentheses are the median and the lowest correlation
    within single contexts.
    """
    from llama_cpp import Llama

    plugin, generator = Native(), np.random.default_rng(5)
    with contextlib.ExitStack() as stack:
        stack.enter_context(activate({"on_error": "raise"}, {"bench": plugin}))
        settings = {"n_ctx": 1024, "flash_attn": True, "verbose": False}
        llama = Llama(str(reference_model_path()), **settings)
        stack.callback(llama.close)
        taps = [plugin.context.density(row_step=row, layer_step=layer) for row, layer in STEPS]
        contexts = cut(texts(llama), LENGTHS[length], generator)

        def look():
            return [densities(llama, taps, tokens, turns, generator) for tokens in contexts]

        found = benchmark.pedantic(look, rounds=1)
    benchmark.extra_info.update(contexts=len(found), chunks=sum(len(each[0]) for each in found))
    for i, (row, layer) in enumerate(STEPS[1:], start=1):
        pooled = correlation(*np.concatenate([each[[0, i]] for each in found], axis=1))
        single = [correlation(each[0], each[i]) for each in found]
        figures = f"{pooled:.4f} ({np.median(single):.3f}, {min(single):.3f})"
        benchmark.extra_info[f"1/{row} of queries, 1/{layer} of layers"] = figures


@pytest.mark.parametrize("row_step", [1, ROW_STEP], ids=["exact", "sampled"])
@pytest.mark.parametrize("what", ["prefill", "generate"])
@pytest.mark.parametrize("size", ["200m", "1b"])
def bench_cost(request, benchmark, size, what, row_step):
    """Compare a context with a density tap with the same context without one.

    The work is 512 tokens at once, or 8 tokens one by one after 512.
    """
    plugin = Native()
    with contextlib.ExitStack() as stack:
        stack.enter_context(activate({"on_error": "raise"}, {"bench": plugin}))
        model = stack.enter_context(loaded(request.getfixturevalue(f"model_{size}")))
        context = stack.enter_context(batches(model))

        n_kept = 0 if what == "prefill" else N_PREFILL
        if n_kept:
            context.prefill(n_kept)

        def vanilla():
            context.generate() if n_kept else context.prefill(N_PREFILL)

        tap = contextlib.ExitStack()

        def ours():
            tap.enter_context(plugin.context.density(row_step=row_step))
            vanilla()

        def before():
            tap.close()
            context.cut(n_kept)

        compare(benchmark, ours, vanilla, before=before, rounds=ROUNDS[size])


def texts(llama):
    """Return the tokens of each text."""
    named = os.environ.get("LLMAAS_BENCH_TEXTS")
    if named is None:
        return conversation_texts(llama, 1 << 20)
    path = Path(named)
    files = sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else [path]
    return [llama.tokenize(read(each)[:TEXT_CHARACTERS].encode()) for each in files]


def read(path):
    if path.suffix == ".txt":
        return path.read_text(encoding="utf-8")
    messages = [m for talk in load_conversations(path) for m in talk.messages]
    return "".join(f"{m.role.capitalize()}: {m.content}\n" for m in messages)


def cut(texts, lengths, generator):
    """Cut up to ``N_CONTEXTS`` contexts of random lengths, equally many from each text.

    If there are more texts than contexts, cut them from all texts concatenated.
    """
    stream = np.concatenate(texts) if len(texts) > N_CONTEXTS else None
    sources = [stream] if stream is not None else texts
    contexts = []
    for source in sources:
        start, n_wanted = 0, N_CONTEXTS / len(sources)
        while n_wanted > 0 and start + lengths[0] <= len(source):
            n = int(generator.integers(*lengths))
            contexts.append(source[start : start + n])
            start, n_wanted = start + n, n_wanted - 1
    return contexts


def densities(llama, taps, tokens, turns, generator):
    """Evaluate the tokens; return densities of whole chunks, shape ``(n_taps, n_chunks)``."""
    llama.reset()
    llama._ctx.kv_cache_clear()
    for tap in taps:
        tap.reset()
    start = 0
    while start < len(tokens):
        n = int(generator.integers(*TURN)) if turns else len(tokens)
        llama.eval([int(token) for token in tokens[start : start + n]])
        start += n
        for token in tokens[start : start + ANSWER if turns else 0]:
            llama.eval([int(token)])
            start += 1
    n_chunks = len(tokens) // CHUNK_TOKENS
    read = [tap.read(n_chunks * CHUNK_TOKENS) for tap in taps]
    sums, counts = (
        np.array(read).reshape(len(taps), 2, n_chunks, CHUNK_TOKENS).sum(-1).swapaxes(0, 1)
    )
    return sums / np.maximum(counts, 1)


def correlation(one, other):
    ranks = [np.argsort(np.argsort(values)) for values in (one, other)]
    return float(np.corrcoef(ranks)[0, 1])

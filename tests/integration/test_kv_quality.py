"""int8 contexts: how far the model drifts on real text after its cells went through 8 bits."""

from __future__ import annotations

import contextlib
from importlib.resources import files

import llama_cpp
import numpy as np
import pytest
from llama_cpp import Llama

from llmaas_plugins import activate
from llmaas_plugins.chats import load_conversations

N_TEXTS, N_POSITIONS = 2, 120
FOREIGN = [1, *range(300, 320)]


@pytest.fixture(scope="module")
def texts(reference_model):
    """The first conversation of some apps, as tokens."""
    with contextlib.closing(Llama(str(reference_model), vocab_only=True, verbose=False)) as llama:
        found = []
        for path in sorted((files("llmaas_plugins") / "demo/conversations").iterdir()):
            if path.name.endswith(".jsonl"):
                talk = load_conversations(path)[0]
                lines = [f"{m.role.capitalize()}: {m.content}\n" for m in talk.messages]
                found.append(llama.tokenize("".join(lines).encode())[:350])
    return found[:N_TEXTS]


def ask(llama, tokens):
    """Let a request evaluate a prompt."""
    generator = llama.generate(tokens, temp=0.0)
    next(generator)
    generator.close()


def read_on(llama, text):
    """Log probabilities of every token, at each of the last positions of ``text``."""
    n_past, batch = len(text) - N_POSITIONS - 1, text[-N_POSITIONS - 1 : -1]
    llama._batch.set_batch(batch=batch, n_past=n_past, logits_all=True)
    llama._ctx.decode(llama._batch)
    rows = llama_cpp.llama_get_logits(llama.ctx)
    logits = np.ctypeslib.as_array(rows, shape=(len(batch), llama.n_vocab())).astype(np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def read(llama, text, n_swaps):
    """Read the beginning in pieces, with another context after each, and then read on."""
    n_prompt = len(text) - N_POSITIONS - 1
    for i in reversed(range(n_swaps)):
        ask(llama, text[: n_prompt - 23 * i])
        ask(llama, FOREIGN)
    ask(llama, text[:n_prompt])
    return read_on(llama, text)


def compare(texts, vanilla, ours):
    """Perplexity ratio, mean KL divergence, and how often the most likely token is the same."""
    targets = np.concatenate([text[-N_POSITIONS:] for text in texts])
    a, b = np.concatenate(vanilla), np.concatenate(ours)
    assert len(a) == len(b) == len(targets) >= 200
    i = np.arange(len(targets))
    ratio = np.exp((a[i, targets] - b[i, targets]).mean())
    divergence = (np.exp(a) * (a - b)).sum(axis=1).mean()
    return ratio, divergence, (a.argmax(axis=1) == b.argmax(axis=1)).mean()


def through_the_store(make_llama, tmp_path, texts, n_swaps, **settings):
    table = {"codec": "int8", "store": str(tmp_path / "kv")}
    with activate({"on_error": "raise", "plugins": {"kv_chunks": table}}) as suite:
        llama = make_llama(n_ctx=512, n_threads_batch=1, **settings)
        found = [read(llama, text, n_swaps) for text in texts]
        report = suite.status()["plugins"]["kv_chunks"]
        llama.close()
    assert report["restored_tokens"] > n_swaps * sum(len(text) - 220 for text in texts)
    return found


@pytest.fixture(scope="module")
def vanilla(reference_model, texts):
    settings = {"n_ctx": 512, "verbose": False, "n_threads": 1, "n_threads_batch": 1}
    with contextlib.closing(Llama(str(reference_model), **settings)) as llama:
        return [read(llama, text, 0) for text in texts]


@pytest.mark.parametrize("n_swaps", [1, 4])
def test_int8_keeps_the_predictions(make_llama, tmp_path, texts, vanilla, n_swaps):
    """Nor do many swaps add up."""
    found = through_the_store(make_llama, tmp_path, texts, n_swaps)
    ratio, divergence, agreement = compare(texts, vanilla, found)
    assert abs(ratio - 1) < 0.004  # measured: 0.0004; 0.0016 over twice as much text
    assert 0 < divergence < 3.6e-4  # 1.2e-4
    assert agreement >= 0.97  # 0.988


def test_int8_of_q8_0_cells_is_exact(make_llama, tmp_path, texts):
    """They are 8-bit groups already."""
    settings = {"type_k": 8, "type_v": 8, "flash_attn": True}
    vanilla = make_llama(n_ctx=512, n_threads_batch=1, **settings)
    expected = [read(vanilla, texts[0], 0)]
    found = through_the_store(make_llama, tmp_path, texts[:1], 1, **settings)
    assert np.array_equal(expected, found)

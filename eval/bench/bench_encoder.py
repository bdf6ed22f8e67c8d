"""Time of the tiny encoder for a prompt of 500 words, and the part of it that is Python.

The encoder has the real one's size and random weights, which change no time.
"""

from __future__ import annotations

import time

import numpy as np
import pytest

from llmaas_plugins.short_prompts.encoder.body import Body
from llmaas_plugins.short_prompts.encoder.model_file import EncoderFile, Head
from llmaas_plugins.short_prompts.encoder.outputs import Outputs
from llmaas_plugins.short_prompts.scorer import Prompt
from llmaas_plugins.short_prompts.scorers.encoder import EncoderScorer

N_LAYERS, N_EMBD, N_FF, N_VOCAB, N_POSITIONS = 6, 384, 1536, 30_522, 512
N_WORDS, ROUNDS = 500, 12


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    chance = np.random.default_rng(0)

    def some(*shape):
        return chance.standard_normal(shape, np.float32) / 20

    weights = {
        "token_embd.weight": some(N_VOCAB, N_EMBD),
        "position_embd.weight": some(N_POSITIONS, N_EMBD),
        "token_types.weight": some(2, N_EMBD),
        "token_embd_norm.weight": 1 + some(N_EMBD),
        "token_embd_norm.bias": some(N_EMBD),
    }
    matrices = {f"attn_{name}": (N_EMBD, N_EMBD) for name in ("q", "k", "v", "output")}
    matrices |= {"ffn_up": (N_FF, N_EMBD), "ffn_down": (N_EMBD, N_FF)}
    for layer in range(N_LAYERS):
        for name, shape in matrices.items():
            weights[f"blk.{layer}.{name}.weight"] = some(*shape)
            weights[f"blk.{layer}.{name}.bias"] = some(shape[0])
        for name in ("attn_output_norm", "layer_output_norm"):
            weights[f"blk.{layer}.{name}.weight"] = 1 + some(N_EMBD)
            weights[f"blk.{layer}.{name}.bias"] = some(N_EMBD)
    pieces = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", *(f"w{i}" for i in range(N_VOCAB - 4)))
    body = Body(weights, pieces, "0" * 64)
    path = tmp_path_factory.mktemp("encoder") / "encoder.gguf"
    EncoderFile.write(path, body, {}, Head(some(2, N_EMBD), np.zeros(2, np.float32)))
    return path


@pytest.fixture(scope="module")
def prompt():
    numbers = np.random.default_rng(1).integers(0, N_VOCAB - 4, N_WORDS)
    return Prompt(
        tokens=np.zeros(N_WORDS, np.int32),
        starts=np.arange(N_WORDS + 1, dtype=np.int32),
        words=tuple(f" w{number}" for number in numbers),
        is_protected=np.zeros(N_WORDS, bool),
        is_frequent=np.zeros(N_WORDS, bool),
        question=N_WORDS,
    )


@pytest.mark.benchmark(group="encoder: 500 words")
@pytest.mark.parametrize("n_threads", [1, 2])
def bench_scores(benchmark, encoder, prompt, monkeypatch, n_threads):
    engine_s, of = [0.0], Outputs.of

    def timed(outputs, ids):
        started = time.perf_counter()
        found = of(outputs, ids)
        engine_s[0] += time.perf_counter() - started
        return found

    monkeypatch.setattr(Outputs, "of", timed)
    scorer, python_s = EncoderScorer(encoder, n_threads), []

    def score():
        engine_s[0], started = 0.0, time.perf_counter()
        found = scorer.scores(prompt, None)
        python_s.append(time.perf_counter() - started - engine_s[0])
        return found

    score()  # loads the encoder
    first = score()
    found = benchmark.pedantic(score, rounds=ROUNDS, warmup_rounds=1)
    scorer.close()
    np.testing.assert_array_equal(found, first)
    benchmark.extra_info.update(python_ms=1000 * float(np.median(python_s[2:])))

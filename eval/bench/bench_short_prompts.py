"""Time that Python takes to shorten a prompt, without a scorer's."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

from llmaas_eval.paired import repeats
from llmaas_plugins.elastic.calibration import packaged_texts
from llmaas_plugins.reference_model import reference_model_path

SHARE = 0.5


@pytest.mark.parametrize("n_tokens", [500, 4000])
def bench_words(benchmark, n_tokens):
    """Divide a chat of so many tokens into words, protect some, and keep half of the tokens."""
    from llama_cpp import Llama

    from llmaas_plugins.short_prompts.budget import budget, shorten
    from llmaas_plugins.short_prompts.protection import prompt_of
    from llmaas_plugins.short_prompts.vocabulary import vocabulary_of

    with contextlib.closing(
        Llama(str(reference_model_path()), vocab_only=True, verbose=False)
    ) as llama:
        story = " ".join(packaged_texts().values())
        question = llama.tokenize(b"\nUser: And where was it?\nAssistant:", add_bos=False)
        text = llama.tokenize(f"User: {story}".encode())
        tokens = np.array([*text[: n_tokens - len(question)], *question], np.int32)
        vocabulary = vocabulary_of(llama)
        scores = np.random.default_rng(0).random(n_tokens, np.float32)

        def shortened():
            prompt = prompt_of(tokens, vocabulary)
            return shorten(prompt, scores[: len(prompt.words)], budget(prompt, SHARE))

        found = benchmark.pedantic(shortened, rounds=repeats(500), warmup_rounds=2)
    assert len(tokens) == n_tokens
    benchmark.extra_info.update(
        n_words=len(found.prompt.words),
        n_left_out=found.n_left_out,
        protected=float(found.prompt.is_protected.mean()),
    )

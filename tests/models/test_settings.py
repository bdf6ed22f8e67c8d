"""Unusual settings of a context: still exact, or left alone."""

from __future__ import annotations

import llama_cpp
import numpy as np
import pytest
from switching import ENDINGS, N_FIRST_CELLS, OTHER, PROMPT, Conversation, ask

SETTINGS = {
    "flash attention": {"flash_attn": True},
    "q8_0 keys": {"type_k": llama_cpp.GGML_TYPE_Q8_0},
    "q8_0 cells": {
        "type_k": llama_cpp.GGML_TYPE_Q8_0,
        "type_v": llama_cpp.GGML_TYPE_Q8_0,
        "flash_attn": True,
    },
    "q4_0 cells": {
        "type_k": llama_cpp.GGML_TYPE_Q4_0,
        "type_v": llama_cpp.GGML_TYPE_Q4_0,
        "flash_attn": True,
    },
    "bf16 cells": {"type_k": 30, "type_v": 30},
    "f32 cells": {"type_k": llama_cpp.GGML_TYPE_F32, "type_v": llama_cpp.GGML_TYPE_F32},
    "n_ctx of no round size": {"n_ctx": 333},
    "n_ctx of the model": {"n_ctx": 0},
    "beyond training": {"n_ctx": 2048},
    "no offload_kqv": {"offload_kqv": False},
    "no swa_full": {"swa_full": False},
    "small batches": {"n_batch": 32, "n_ubatch": 16},
    "every token's logits": {"logits_all": True},
    "no mmap": {"use_mmap": False},
    "linear RoPE scaling": {"rope_scaling_type": 1, "rope_freq_scale": 0.5},
    "YaRN": {"rope_scaling_type": 2, "rope_freq_scale": 0.5, "yarn_orig_ctx": 512},
}


CASES = [("llama", setting) for setting in SETTINGS]
CASES += [
    (name, setting)
    for name in ("deepseek2", "gemma3")
    for setting in ("flash attention", "q8_0 cells", "f32 cells", "small batches")
]


@pytest.mark.parametrize(("name", "setting"), CASES)
def test_contexts_go_on_with_vanillas_logits(name, setting, family, suite, report):
    conversation = Conversation(family(name), SETTINGS[setting])
    answer, expected = conversation.vanilla()
    active = suite()
    with conversation.open() as llama:
        assert conversation.first(llama) == answer
        assert np.array_equal(conversation.second(llama, answer), expected[0])
        assert report(active)["restores"] == 1
    active = suite()
    with conversation.open() as llama:
        assert np.array_equal(conversation.second(llama, answer, ENDINGS[1]), expected[1])
        found = report(active)
    assert (found["restored_tokens"], found["left_alone"]) == (N_FIRST_CELLS, [])


def test_cells_that_depend_on_what_follows_are_left_alone(family, suite, report):
    """Two prompts with one beginning have different cells there, so nothing can be shared."""
    settings = {"attention_type": llama_cpp.LLAMA_ATTENTION_TYPE_NON_CAUSAL}
    conversation = Conversation(family("llama"), settings)

    def logits():
        with conversation.open() as llama:
            return [ask(llama, prompt, 2)[1] for prompt in (PROMPT, OTHER, PROMPT)]

    expected = logits()
    active = suite()
    assert np.array_equal(logits(), expected)
    found = report(active)
    reason = "attention is not causal: cells depend on what follows"
    assert (found["left_alone"], found["saves"]) == ([f"llama.gguf: {reason}"], 0)


def low_level_context(model, **wanted):
    """Make a context by the bindings; return its real and reported sequences, and its size."""
    params = llama_cpp.llama_context_default_params()
    params.n_ctx, params.n_threads = 1024, 1
    for name, value in wanted.items():
        setattr(params, name, value)
    ctx = llama_cpp.llama_init_from_model(model, params)
    found = [size(ctx) for size in (*REAL, llama_cpp.llama_n_seq_max, llama_cpp.llama_n_ctx_seq)]
    llama_cpp.llama_free(ctx)
    return found


REAL = (llama_cpp.llama_n_seq_max,)


@pytest.mark.parametrize("unified", [False, True])
def test_sequences_of_the_apps_own_are_vanilla(family, suite, report, unified):
    active = suite()
    with Conversation(family("llama")).open() as llama:
        found = low_level_context(llama.model, n_seq_max=4, kv_unified=unified)
        assert found == [4, 4, 1024 if unified else 1024 // 4]
        found = low_level_context(llama.model, kv_unified=unified)
        assert found == [2, 1, 1024]  # one sequence has all cells, split or not
    assert report(active)["left_alone"] == ["llama.gguf: the app itself uses 4 sequences"]


def test_a_context_that_cannot_be_made_is_none_as_ever(family, suite):
    suite()
    with Conversation(family("llama")).open() as llama:
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.type_v = 256, llama_cpp.GGML_TYPE_Q4_0
        params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        assert llama_cpp.llama_init_from_model(llama.model, params) is None

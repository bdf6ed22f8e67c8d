"""LoRA adapters and control vectors: cells of different computations are never mixed up."""

from __future__ import annotations

import ctypes

import llama_cpp
import numpy as np
import pytest
from switching import N_FIRST_CELLS, OTHER, PROMPT, Conversation, ask

from llmaas_eval.families import write_lora

N_EMBD, N_LAYER = 256, 2


@pytest.mark.compat("models", "llama + LoRA", "kv_chunks, lossless", "restored")
def test_each_adapter_and_scale_has_chunks_of_its_own(family, lora, tmp_path, suite, report):
    other = write_lora("llama", tmp_path / "other.gguf", seed=1)
    settings = [
        {},
        {"lora_path": str(lora)},
        {"lora_path": str(lora), "lora_scale": 0.5},
        {"lora_path": str(other)},
    ]
    conversations = [Conversation(family("llama"), each) for each in settings]
    expected = [each.vanilla() for each in conversations]
    active = suite()
    for conversation, (answer, logits) in zip(conversations, expected, strict=True):
        before = report(active)["restored_tokens"]
        with conversation.open() as llama:
            assert ask(llama, PROMPT, 4)[0] == answer
            assert report(active)["restored_tokens"] == before  # nothing of another computation
            ask(llama, OTHER, 2)
            assert np.array_equal(conversation.second(llama, answer), logits[0])
            assert report(active)["restored_tokens"] > before
    assert report(active)["left_alone"] == []
    active = suite()
    for conversation, (answer, _) in zip(conversations, expected, strict=True):
        before = report(active)["restored_tokens"]
        with conversation.open() as llama:
            conversation.second(llama, answer)
            assert report(active)["restored_tokens"] - before >= N_FIRST_CELLS
    assert len({logits[0].tobytes() for _, logits in expected}) == len(settings)


def set_adapters(llama, lora):
    adapter = llama_cpp.llama_adapter_lora_init(llama.model, str(lora).encode())
    adapters = (llama_cpp.llama_adapter_lora_p_ctypes * 1)(adapter)
    assert llama_cpp.llama_set_adapters_lora(llama.ctx, adapters, 1, (ctypes.c_float * 1)(1)) == 0


def set_adapter(llama, lora):
    adapter = llama_cpp.llama_adapter_lora_init(llama.model, str(lora).encode())
    with pytest.warns(DeprecationWarning, match="llama_set_adapters_lora"):
        assert llama_cpp.llama_set_adapter_lora(llama.ctx, adapter, 1.0) == 0


def set_control_vector(llama, lora):
    del lora
    size = N_EMBD * N_LAYER
    data = (ctypes.c_float * size)(*np.linspace(-1, 1, size).tolist())
    llama_cpp.llama_set_adapter_cvec(llama.ctx, data, size, N_EMBD, 1, N_LAYER)


def clear_causal(llama, lora):
    del lora
    llama_cpp.llama_set_causal_attn(llama.ctx, False)


CALLS = {
    "llama_set_adapters_lora": set_adapters,
    "llama_set_adapter_lora": set_adapter,
    "llama_set_adapter_cvec": set_control_vector,
    "llama_set_causal_attn": clear_causal,
}


def altered(conversation, alter, lora):
    """Return the logits after the app changed the computation, and the logits that follow."""
    with conversation.open() as llama:
        ask(llama, PROMPT, 4)
        alter(llama, lora)
        return [ask(llama, prompt, 4)[1] for prompt in (OTHER, PROMPT, OTHER)]


@pytest.fixture(params=["plain", "with LoRA"])
def conversation(request, family, lora):
    settings = {} if request.param == "plain" else {"lora_path": str(lora)}
    return Conversation(family("llama"), settings)


@pytest.mark.parametrize("name", CALLS)
def test_computations_that_the_app_changes_are_vanilla(name, conversation, lora, suite, report):
    alter = CALLS[name]
    expected = altered(conversation, alter, lora)
    active = suite()
    found = altered(conversation, alter, lora)
    assert all(map(np.array_equal, found, expected))
    status = report(active)
    called = name.replace("adapter_lora", "adapters_lora")
    assert status["left_alone"] == [f"llama.gguf: the app called {called}"]
    assert (status["saves"], status["restores"]) == (1, 0)  # earlier cells stay valid


def test_a_change_while_a_request_runs_is_not_kept(family, lora, suite, report):
    active = suite()
    with Conversation(family("llama")).open() as llama:
        generator = llama.generate(PROMPT, temp=0.0)
        next(generator)
        set_adapters(llama, lora)
        next(generator)
        generator.close()
    assert report(active)["saves"] == 0

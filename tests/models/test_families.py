"""Every family of models: contexts are kept to the bit, or left exactly as in vanilla."""

from __future__ import annotations

import llama_cpp
import numpy as np
import pytest
from switching import ENDINGS, N_FIRST_CELLS, OTHER, PROMPT, Conversation, ask

from llmaas_eval.families import FAMILIES
from llmaas_plugins import activate

SERVED = (
    *("llama", "qwen2", "qwen3", "phi3", "gemma3"),
    *("llama-moe", "qwen3moe", "gpt-oss", "deepseek2"),
)
LEFT = {
    "gemma3, swa_full=False": (
        "sliding window of 64 tokens without swa_full: old cells are gone",
        "sliding window",
    ),
    "deepseek32": ("its state has more than caches of keys and values", "indexer"),
    "mamba2": ("recurrent model: its state cannot drop ranges", "recurrent"),
    "granitehybrid": ("hybrid model: its state cannot drop ranges", "hybrid"),
    "qwen2vl": ("2-D positions (M-RoPE)", "M-RoPE"),
    "bert": ("encoder or diffusion model: it keeps no cells", "encoder"),
}
ALIKE = {"gemma", "gemma2"}
"""Families whose kinds of cells gemma3 covers."""
REAL = (llama_cpp.llama_n_seq_max,)
"""The original binding; the name is patched while a suite is active."""


def column(name, cell, rows):
    """Return the rows as parameters, each filling its cell of the page."""
    return [pytest.param(row, marks=pytest.mark.compat("models", row, name, cell)) for row in rows]


def test_every_family_is_one_or_the_other():
    assert FAMILIES.keys() == {*SERVED, *LEFT, *ALIKE} - {"gemma3, swa_full=False"}


def traces(path, **settings):
    """Return an app's view of three requests: tokens, logits, the state, and the sizes."""
    with Conversation(path, settings).open() as llama:
        if settings.get("embedding"):
            found = [llama.embed("A boat came back.")]
        else:
            found = [
                (tokens, logits.tobytes())
                for tokens, logits in (ask(llama, p, 4) for p in (PROMPT, OTHER, PROMPT))
            ]
        return found, *seen(llama)


def seen(llama):
    """Return the context as the engine has it, and as the app reads it."""
    state = llama.save_state()
    sizes = [llama_cpp.llama_n_ctx, llama_cpp.llama_n_ctx_seq, llama_cpp.llama_n_seq_max, *REAL]
    return state.llama_state, state.n_tokens, [size(llama.ctx) for size in sizes]


def split(name):
    """Return family and settings of a row."""
    settings = {"bert": {"embedding": True}, "gemma3, swa_full=False": {"swa_full": False}}
    return name.partition(",")[0], settings.get(name, {})


@pytest.mark.parametrize("name", column("nothing enabled", "vanilla", [*SERVED, *LEFT]))
def test_nothing_enabled_changes_no_byte(name, family):
    name, settings = split(name)
    expected = traces(family(name), **settings)
    with activate({}):
        assert traces(family(name), **settings) == expected


@pytest.mark.parametrize("name", column("kv_chunks, lossless", "restored", SERVED))
def test_contexts_go_on_with_vanillas_logits(name, family, suite, report):
    conversation = Conversation(family(name))
    answer, expected = conversation.vanilla()
    active = suite()
    with conversation.open() as llama:
        assert conversation.first(llama) == answer
        assert np.array_equal(conversation.second(llama, answer), expected[0])
        found = report(active)
    assert (found["restores"], found["left_alone"]) == (1, [])
    active = suite()  # another life of the process, on the same store
    with conversation.open() as llama:
        assert np.array_equal(conversation.second(llama, answer, ENDINGS[1]), expected[1])
        assert report(active)["restored_tokens"] == N_FIRST_CELLS


@pytest.mark.parametrize("name", column("kv_chunks, int8", "restored", SERVED))
def test_contexts_of_8_bits_stay_close(name, family, suite, report):
    conversation = Conversation(family(name))
    answer, expected = conversation.vanilla()
    active = suite(codec="int8")
    with conversation.open() as llama:
        assert conversation.first(llama) == answer
        found = conversation.second(llama, answer)
        assert report(active)["restores"] == 1
    first = expected[0][0]  # later tokens may differ, and then everything after them
    error = np.sqrt(np.mean((found[0] - first) ** 2))
    assert 0 < error < 0.1 * first.std()


def left(name, codec):
    """Return a row of a model that is left alone, with the reason in a word."""
    marks = [
        pytest.mark.compat("models", name, f"kv_chunks, {codec}", "vanilla"),
        pytest.mark.compat("models", name, "why", LEFT[name][1]),
    ]
    return pytest.param(name, codec, marks=marks)


@pytest.mark.parametrize(
    ("name", "codec"), [left(name, codec) for name in LEFT for codec in ("lossless", "int8")]
)
def test_what_cannot_be_kept_is_vanilla(name, codec, family, suite, said):
    reason = "embedding context" if name == "bert" else LEFT[name][0]
    name, settings = split(name)
    reason = f"{name}.gguf: {reason}"
    expected = traces(family(name), **settings)
    active = suite(codec=codec)
    assert [traces(family(name), **settings) for _ in range(2)] == [expected] * 2
    found = active.status()["plugins"]["kv_chunks"]
    assert found["left_alone"] == [reason]
    assert found["restores"] == found["saves"] == found.get("chunks", 0) == 0
    assert said() == [f"kv_chunks does not serve a context: {reason}"]


def test_what_only_its_context_shows_is_made_again_as_vanilla(family, suite, report):
    """Nothing in this encoder's model file shows that it keeps no cells; its first context does."""
    expected = encoder_context(family("bert"))
    active = suite()
    assert encoder_context(family("bert")) == expected
    assert report(active)["left_alone"] == [f"bert.gguf: {LEFT['bert'][0]}"]


def encoder_context(path):
    with Conversation(path).open() as llama:
        return seen(llama)


@pytest.mark.parametrize("name", column("for embeddings", "vanilla", ["llama", "gemma3"]))
def test_decoders_used_for_embeddings_are_vanilla(name, family, suite, report):
    expected = traces(family(name), embedding=True)
    active = suite()
    assert traces(family(name), embedding=True) == expected
    assert report(active)["saves"] == 0

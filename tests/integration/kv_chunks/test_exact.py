"""Lossless contexts: after swap-out and restore, their logits are vanilla's bit for bit."""

from __future__ import annotations

import contextlib

import llama_cpp
import numpy as np
import pytest
from background import chunks_at_rest
from llama_cpp import Llama
from switching import ask

Q8_0 = llama_cpp.GGML_TYPE_Q8_0
CASES = {
    "f16": {},
    "f16 flash": {"flash_attn": True},
    "q8_0 K": {"type_k": Q8_0},
    "q8_0 flash": {"type_k": Q8_0, "type_v": Q8_0, "flash_attn": True},
    "small batches": {"n_batch": 32},
}
RNG = np.random.default_rng(0)
SYSTEM = [1, *RNG.integers(300, 4000, 69).tolist()]
PROMPT = [*SYSTEM, *RNG.integers(300, 4000, 30).tolist()]
OTHER = [*SYSTEM, *RNG.integers(300, 4000, 40).tolist()]
FOREIGN = [1, *RNG.integers(300, 4000, 50).tolist()]
LONG = [1, *RNG.integers(300, 4000, 170).tolist()]
MORE = RNG.integers(300, 4000, 20).tolist()
N_FIRST, N_THEN = 4, 16


def grown(prompt, answer):
    """Return the prompt after the answer, whose last token was not evaluated yet."""
    return [*prompt, *answer[:-1], *MORE]


@pytest.fixture(scope="module", params=CASES)
def case(request, reference_model):
    """Return settings, and vanilla's logits with nothing between two requests."""
    settings = {"n_ctx": 256, "seed": 1, "verbose": False, "n_threads": 1, "n_threads_batch": 1}
    settings |= CASES[request.param]

    def make():
        return contextlib.closing(Llama(str(reference_model), **settings))

    expected = {}
    for name, prompt in (("short", PROMPT), ("long", LONG)):
        with make() as llama:
            answer, _ = ask(llama, prompt, N_FIRST)
            expected[name] = (answer, *ask(llama, grown(prompt, answer), N_THEN))
    return make, expected


def report(suite):
    """Return the plugin's status; nothing may be pinned between requests."""
    store = chunks_at_rest(suite)
    assert all(chunk.pins == 0 for chunk in store.tree)
    return suite.status()["plugins"]["kv_chunks"]


def check(llama, prompt, expected):
    answer, tokens, logits = expected
    found, rows = ask(llama, grown(prompt, answer), N_THEN)
    assert found == tokens
    assert np.array_equal(rows, logits)  # bit for bit


def test_restored_from_ram(case, suite):
    make, expected = case
    active = suite(disk_budget=0)
    with make() as llama:
        assert ask(llama, PROMPT, N_FIRST)[0] == expected["short"][0]
        ask(llama, FOREIGN, 2)
        check(llama, PROMPT, expected["short"])
        found = report(active)
    assert (found["restores"], found["restored_tokens"]) == (1, len(PROMPT) + N_FIRST - 1)
    assert (found["ram_hits"], found["disk_hits"]) == (7, 0)
    with make() as llama:  # another engine of the process
        check(llama, PROMPT, expected["short"])
        assert report(active)["restores"] == 2


def test_restored_behind_a_prefix_that_stayed(case, suite):
    """Both contexts begin alike: only the difference is loaded, behind cells that stayed."""
    make, expected = case
    active = suite(disk_budget=0)
    with make() as llama:
        ask(llama, PROMPT, N_FIRST)
        ask(llama, OTHER, 2)
        check(llama, PROMPT, expected["short"])
        found = report(active)
    n_kept = len(SYSTEM) // 16 * 16
    assert found["restored_tokens"] == len(PROMPT) + N_FIRST - 1 - n_kept
    assert found["reused_tokens"] == len(SYSTEM) + len(PROMPT) + N_FIRST - 1


def test_restored_in_another_life(case, suite):
    make, expected = case
    suite()
    with make() as llama:
        ask(llama, PROMPT, N_FIRST)
    active = suite()
    with make() as llama:
        check(llama, PROMPT, expected["short"])
        found = report(active)
    assert (found["ram_hits"], found["disk_hits"]) == (0, 7)
    assert found["restored_tokens"] == len(PROMPT) + N_FIRST - 1


def test_restored_in_segments(case, suite):
    """The transfer buffers and RAM hold only a fraction of the context."""
    make, expected = case
    suite(ram_budget="1 MiB")
    with make() as llama:
        assert ask(llama, LONG, N_FIRST)[0] == expected["long"][0]
    active = suite(ram_budget="1 MiB")
    with make() as llama:
        check(llama, LONG, expected["long"])
        found = report(active)
    assert found["restored_tokens"] == len(LONG) + N_FIRST - 1
    assert (found["ram_hits"], found["disk_hits"]) == (0, 11)
    assert found["ram_bytes"] + found["buffer_bytes"] <= found["ram_budget_bytes"] <= 1 << 20
    assert (found["faults"], found["no_room"], found["io_errors"]) == (0, 0, 0)

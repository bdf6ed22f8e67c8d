"""Sliding windows: cells that no later token sees are still kept, in their order."""

from __future__ import annotations

import numpy as np
import pytest
from switching import Conversation, ask

from llmaas_plugins.kv_chunks.transfer.chunk_saver import _runs

RNG = np.random.default_rng(7)
N_TURNS, N_TALKS = 4, 4
TALKS = [
    [
        [*([1, 900 + talk] if turn == 0 else []), *RNG.integers(300, 4000, n).tolist()]
        for turn, n in enumerate(RNG.integers(3, 120, N_TURNS))
    ]
    for talk in range(N_TALKS)
]


def go_on(llama, history, piece):
    """Return the context's tokens after a turn, and the turn's logits."""
    prompt = [*history, *piece]
    tokens, logits = ask(llama, prompt, 6)
    return [*prompt, *tokens[:-1]], logits


@pytest.mark.parametrize("name", ["gemma3", "gpt-oss"])
def test_talks_of_several_windows_in_any_order(name, family, suite, report):
    conversation = Conversation(family(name), {"n_ctx": 768})
    expected = []
    for talk in TALKS:
        with conversation.open() as llama:
            history, rows = [], []
            for piece in talk:
                history, logits = go_on(llama, history, piece)
                rows.append(logits)
            expected.append(rows)
    order = RNG.permutation([talk for talk in range(N_TALKS) for _ in range(N_TURNS)]).tolist()
    active = suite()
    with conversation.open() as llama:
        histories, turns = [[] for _ in TALKS], [0] * N_TALKS
        for talk in order:
            turn = turns[talk]
            histories[talk], logits = go_on(llama, histories[talk], TALKS[talk][turn])
            assert np.array_equal(logits, expected[talk][turn])
            turns[talk] += 1
    found = report(active)
    assert found["restored_tokens"] > 500
    assert (found["left_alone"], found["faults"]) == ([], 0)


def test_cells_are_read_a_window_at_a_time():
    assert list(_runs([0, 1, 2, 3, 4, 5, 6, 7, 9], 6, 4)) == [
        range(4),
        range(4, 8),
        range(9, 10),
    ]
    assert list(_runs(list(range(5)), 3, 1 << 30)) == [range(3), range(3, 5)]

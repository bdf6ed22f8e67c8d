"""Requests that are decoded together are each mixed with the pairs of their own app."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from batched import at_once, batches, one_by_one, take_cells
from datastores import CONVERSATIONS
from knn_stores import report
from paired import Pair
from served import LONG_N_CTX, drain, serving

pytest.importorskip("fastapi")

N = 10
QUESTIONS = {"a": CONVERSATIONS[0].title, "b": CONVERSATIONS[3].title}
OWNERS = ["a", "a", "a", "b", "b", "b"]
"""App that each conversation is of."""
EXACT = {"n_ubatch": 1, "flash_attn": True}
"""Engine whose logits do not depend on the other cells that lie between a request's own."""
SHORT = 8
"""Fewer tokens than each prompt has beyond the beginning that all share, which may be another
call's cells: the datastore would not be judged on it."""
CONFIG = """
on_error = "raise"
[service]
state_dir = "state"
most_together = 4
[plugins.kv_chunks]
codec = "int8"
store = "kv"
[plugins.knn_lm]
store = "knn"
look_back = {look_back}
"""


@pytest.fixture(scope="session")
def reference_model(packaged_model):
    """Return the packaged model, which the server has."""
    return packaged_model


@pytest.fixture
def pair(make):
    with contextlib.closing(make()) as llama:
        prompts = {
            app: llama.tokenize(f"User: {question}\nAssistant:".encode(), special=True)
            for app, question in QUESTIONS.items()
        }
    return Pair(prompts)


@pytest.mark.parametrize("look_back", [0, 16])
def test_logits_are_those_of_requests_alone(  # noqa: PLR0917  fixtures
    pair, pairs, store, mixing, make, look_back
):
    pairs.write(store, owners=OWNERS)
    with mixing(pair, look_back=look_back) as suite:
        pair.llama = make(**EXACT)
        with_own = pair.check(N)
        assert pair.n_batches == N - 2
        assert report(suite)["unmatched"] == 0
        assert report(suite)["mixed"] >= 2 * len(QUESTIONS) * (N - 2)
    pairs.write(store, owners=OWNERS[::-1])
    with mixing(pair, look_back=look_back):
        pair.llama = make(**EXACT)
        with_others = pair.check(N)
    for app in QUESTIONS:
        assert not np.array_equal(with_own[app][1], with_others[app][1])


@pytest.mark.slow
@pytest.mark.parametrize("look_back", [0, SHORT])
@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
def test_calls_answer_as_alone(tmp_path, pairs, look_back, is_streamed):
    pairs.write(tmp_path / "knn", owners=OWNERS)
    with serving(tmp_path, config=CONFIG.format(look_back=look_back), n_ctx=LONG_N_CTX) as server:
        assert server.status()["together"]["why_alone"] is None

        def ask(app, question):
            context = server.client.bind(app).new_context()
            options = {"temperature": 0.0, "repeat_penalty": 1.0, "max_tokens": 16}
            if is_streamed:
                text = drain(context.stream(question, **options))[1]["text"]
            else:
                text = context.call(question, **options)["text"]
            context.delete()
            return text

        asks = [
            lambda a=app, q=question: ask(a, q)
            for app in ("a", "b", "c")
            for question in QUESTIONS.values()
        ]
        alone = one_by_one(server, asks)
        assert batches(server) == (0, 0)
        of_a, of_b, of_c = zip(*[iter(alone)] * 2, strict=True)
        assert len({of_a[0], of_b[0], of_c[0]}) >= 2
        mixed = server.status()["plugins"]["knn_lm"]["mixed"]
        for _ in range(3):
            take_cells(server)  # gains of deleted contexts are forgotten, but cells remain
            assert at_once(*asks) == alone
        found = server.status()["plugins"]["knn_lm"]
        assert (found["mixed"], found["unmatched"]) == (4 * mixed, 0)
        n_batches, n_tokens = batches(server)
        assert n_tokens > 1.5 * n_batches > 0

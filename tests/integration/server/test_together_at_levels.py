"""Calls at several levels are decoded together, a batch for each level, and answer as alone.

Each call is of an app of its own, because a call may go on from its app's cells of another level.
"""

from __future__ import annotations

import functools

import pytest
from batched import GREEDY, PROMPTS, at_once, batches, one_by_one
from preparing import prepare
from served import LONG_N_CTX, drain, serving

pytest.importorskip("fastapi")

CONFIG = """
on_error = "raise"
[service]
state_dir = "state"
most_together = 4
[plugins.kv_chunks]
codec = "{codec}"
store = "kv"
[plugins.elastic]
{levels}
"""
SHORT = GREEDY  # long texts hang on the last bits
LEVELS = (1.0, 0.5, 0.5, {"prefill": 0.4, "decode": 0.8}, {"prefill": 1.0, "decode": 0.5})


@pytest.fixture(scope="module")
def model(reference_model, tmp_path_factory):
    return prepare(reference_model, tmp_path_factory.mktemp("model") / "model.gguf")


def together(folder, model, levels="", codec="int8"):
    config = CONFIG.format(levels=levels, codec=codec)
    return serving(folder, "--model", str(model), config=config, n_ctx=LONG_N_CTX)


def ask(server, prompt, level=None, *, is_streamed=False):
    """Return the answer of a new context, which is deleted."""
    options = SHORT | ({} if level is None else {"level": level})
    context = server.client.bind(prompt.replace(" ", "-")).new_context()
    if is_streamed:
        text = drain(context.stream(prompt, **options))[1]["text"]
    else:
        text = context.call(prompt, **options)["text"]
    context.delete()
    return text


def tokens_at(server):
    """Return the number of tokens that were evaluated at each level."""
    return server.status()["plugins"]["elastic"]["tokens"]


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["int8", "tolerance"])
@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
def test_answers_are_those_of_calls_alone(tmp_path, model, codec, is_streamed):
    with together(tmp_path, model, codec=codec) as server:
        assert server.status()["together"]["why_alone"] is None
        asks = [
            functools.partial(ask, server, prompt, level, is_streamed=is_streamed)
            for prompt, level in zip(PROMPTS, LEVELS, strict=True)
        ]
        alone = one_by_one(server, asks)
        assert batches(server) == (0, 0)
        assert len(set(alone)) == len(alone)
        before = tokens_at(server)
        for _ in range(3):
            assert at_once(*asks) == alone
        n_batches, n_tokens = batches(server)
        assert n_tokens > 1.2 * n_batches > 0
        n = {level: found - before.get(level, 0) for level, found in tokens_at(server).items()}
        assert n.keys() == {"1.0", "0.8", "0.5", "0.4"}
        assert n["0.5"] > 2 * n["0.8"] > 0
        server.wait_until_idle()
        assert one_by_one(server, asks) == alone
        assert server.stop() == 0


def test_configured_levels(tmp_path, model):
    levels = "prefill_level = 0.6\ndecode_level = 0.3"
    with together(tmp_path, model, levels) as server:
        asks = [functools.partial(ask, server, prompt) for prompt in PROMPTS[:3]]
        asks.append(functools.partial(ask, server, PROMPTS[4], 1.0))
        alone = one_by_one(server, asks)
        assert at_once(*asks) == alone
        n_batches, n_tokens = batches(server)
        assert n_tokens > 1.5 * n_batches > 0

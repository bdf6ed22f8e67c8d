"""Contexts longer than the window: the model's view, the kept messages, and the stored ones."""

from __future__ import annotations

import contextlib
import re
import sqlite3

import pytest
from served import drain, serving

from llmaas_hooks import LimitError
from llmaas_plugins import activate
from llmaas_plugins.service import LLMService, ServiceConfig
from llmaas_plugins.service.context_log import ContextRecord
from llmaas_plugins.service.window import Window

# Evaluate tokens one by one: texts must not depend on which tokens were restored.
ENGINE = {"n_ctx": 256, "n_ubatch": 1, "n_threads_batch": 1, "flash_attn": True}
GREEDY = {"temperature": 0.0, "max_tokens": 24}
SYSTEM = "You are a shy guest in a hotel."
TURNS = (
    "Hello, how are you today?",
    "Where is the station, and when does the next train to Rome leave?",
    "My dog does not like trains. Is there a bus?",
    "Tell me about the food here, please.",
    "I would like a pizza with cheese and a glass of red wine.",
)


@pytest.fixture(scope="session")
def reference_model(packaged_model):
    """Return the packaged model, whose replies are tokenized as they were said."""
    return packaged_model


@pytest.fixture
def start(make_llama, tmp_path):
    """Start the service on the same directories, as after a restart: new suite, new engine."""

    @contextlib.contextmanager
    def start(**limits):
        table = {"codec": "lossless", "ram_budget": "4 MiB", "store": str(tmp_path / "kv")}
        config = ServiceConfig(state_dir=tmp_path / "state", **limits)
        with (
            activate({"on_error": "raise", "plugins": {"kv_chunks": table}}) as suite,
            contextlib.closing(make_llama(**ENGINE)) as engine,
            LLMService(engine, config) as service,
        ):
            yield service, lambda: suite.settle() or suite.status()["plugins"]["kv_chunks"]

    return start


@pytest.fixture
def vanilla(make_llama):
    """Return text and prompt length of a plain engine's reply to messages."""
    llama = make_llama(**ENGINE)

    def reply(messages):
        done = llama.create_chat_completion(messages=messages, **GREEDY)
        return done["choices"][0]["message"]["content"].strip(), done["usage"]["prompt_tokens"]

    return reply


def converse(context, n):
    """Call ``n`` times; return the prompts with their replies."""
    first = context.record().n_calls
    prompts = [TURNS[i % len(TURNS)] for i in range(first, first + n)]
    return [(prompt, context.call(prompt, **GREEDY)) for prompt in prompts]


def seen(record):
    return [record.messages[0], *record.messages[max(1, record.seen_from) :]]


@pytest.mark.slow
def test_a_conversation_without_end(start, vanilla):
    """Each reply equals llama.cpp's reply to the system prompt and the newest turns."""
    with start() as (service, _):
        context = service.bind("mail").new_context(SYSTEM)
        said, slides, n_prompts = context.record().messages, [], []
        for i in range(14):
            [(prompt, reply)] = converse(context, 1)
            record = context.record()
            text, n_prompt = vanilla(seen(record)[:-1])
            assert reply.text == text
            said += [{"role": "user", "content": prompt}, {"role": "assistant", "content": text}]
            assert record.messages == said  # no message is lost
            assert seen(record)[1]["role"] == "user"
            assert record.n_tokens == reply.n_tokens <= ENGINE["n_ctx"]
            if reply.n_left_out:
                slides.append((i, reply.n_left_out))
            assert len(seen(record)) == len(said) - sum(n for _, n in slides)
            n_prompts.append(n_prompt)
    assert 2 <= len(slides) <= 5  # of 14 calls, only some slide
    assert all(n_prompts[i] <= ENGINE["n_ctx"] // 2 for i, _ in slides)
    assert max(n_prompts) <= ENGINE["n_ctx"] - GREEDY["max_tokens"]


@pytest.mark.slow
def test_between_slides_only_what_is_new_is_evaluated(start):
    with start() as (service, status):
        context, other = (service.bind("mail").new_context(SYSTEM) for _ in range(2))
        known = n_slides = 0
        for i in range(12):
            before = status()
            [(_, reply)] = converse(context, 1)
            after = status()
            n_reused = after["reused_tokens"] - before["reused_tokens"]
            if reply.n_left_out:
                n_slides += 1
                # the system prompt, and tokens that are alike by chance
                assert n_reused < known / 2
            else:
                assert n_reused >= known - 3  # a reply's last tokens may be written otherwise
            known = reply.n_tokens
            other.call(TURNS[i % 2], temperature=0.0, max_tokens=1)  # a switch
        assert n_slides >= 2


@pytest.mark.slow
def test_what_was_left_out_leaves_no_chunks(start):
    with start() as (service, status):
        context = service.bind("mail").new_context(SYSTEM)
        assert sum(reply.n_left_out > 0 for _, reply in converse(context, 12)) >= 2
        found = status()
        n_tokens = context.record().n_tokens
        assert (found["contexts"], found["chunks"]) == (1, -(-n_tokens // found["chunk_tokens"]))
    with start() as (_, status):
        found = status()
        assert (found["contexts"], found["chunks"]) == (1, -(-n_tokens // found["chunk_tokens"]))
    with start() as (service, status):
        context = service.bind("mail").context(context.id)
        assert context.delete() > 0
        assert (status()["chunks"], status()["disk_bytes"]) == (0, 0)


@pytest.mark.slow
def test_the_window_survives_restarts(start):
    with start() as (service, _):
        undisturbed, context = (service.bind("mail").new_context(SYSTEM) for _ in range(2))
        expected = [reply.text for _, reply in converse(undisturbed, 12)]
        starts = [0]
    found = []
    for _ in range(3):
        with start() as (service, status):
            context = service.bind("mail").context(context.id)
            assert context.record().seen_from == starts[-1]
            found += [reply.text for _, reply in converse(context, 4)]
            starts.append(context.record().seen_from)
            assert status()["faults"] == 0
    assert found == expected
    assert len(set(starts)) >= 3


def test_a_stream_closed_early_does_not_slide(start):
    with start() as (service, status):
        context = service.bind("mail").new_context(SYSTEM)
        while (record := context.record()).n_tokens < 200:
            converse(context, 1)
        stream = context.stream(TURNS[0], temperature=0.0, max_tokens=64)
        next(stream)
        stream.close()
        assert context.record() == record
        reply = context.call(TURNS[0], temperature=0.0, max_tokens=64)
        assert reply.n_left_out > 0
        assert context.record().messages[: len(record.messages)] == record.messages
        assert status()["chunks"] == -(-reply.n_tokens // 16)


def test_a_turn_that_does_not_even_fit_alone_changes_nothing(start):
    with start() as (service, _):
        context = service.bind("mail").new_context(SYSTEM)
        converse(context, 8)
        before = context.record()
        for length in (300, 240):
            expected = (
                r"does not fit into 256: the model would see (\d+) or more\. Shorten it.*n_ctx"
            )
            with pytest.raises(LimitError, match=expected) as caught:
                context.call("word " * length)
            assert int(re.search(expected, str(caught.value))[1]) >= max(256, length)
            assert context.record() == before
        with pytest.raises(LimitError, match=r"would see 6\d\d or more"):
            context.call("7" * 10_000)  # it is not tokenized; at best, tokens have 16 bytes each
        reply = context.call("word " * 180, **GREEDY)
        # the model sees only it and the system prompt
        assert reply.n_left_out == len(seen(before)) - 1
        converse(context, 1)


def test_the_reply_may_still_run_into_the_limit(start):
    with start() as (service, _):
        context = service.bind("mail").new_context(SYSTEM)
        endless = {"temperature": 0.0, "repeat_penalty": 0.5, "max_tokens": 500}
        reply = context.call("Tell me a story.", **endless)
        assert (reply.finish_reason, reply.n_tokens) == ("length", ENGINE["n_ctx"] - 1)
        assert reply.n_left_out == 0
        assert context.call("And then?", **GREEDY).n_left_out == 2


def test_an_own_limit_below_the_engines(start):
    with start(max_context_tokens=128) as (service, _):
        context = service.bind("mail").new_context(SYSTEM)
        replies = [reply for _, reply in converse(context, 8)]
    assert max(reply.n_tokens for reply in replies) <= 128
    assert sum(reply.n_left_out > 0 for reply in replies) >= 2


def test_a_refusal_by_choice_keeps_what_was_left_out(start):
    """Switching to ``error`` later does not bring the oldest turns back."""
    with start() as (service, _):
        context = service.bind("mail").new_context(SYSTEM)
        converse(context, 10)
        before = context.record()
        assert before.seen_from > 0
    with start(at_limit="error") as (service, _):
        context = service.bind("mail").context(context.id)
        with pytest.raises(LimitError, match="Start a new context"):
            converse(context, 10)
        record = context.record()
        assert record.seen_from == before.seen_from
        assert record.n_calls > before.n_calls


@pytest.mark.slow
def test_over_http(tmp_path):
    pytest.importorskip("fastapi")
    with serving(tmp_path, n_ctx=ENGINE["n_ctx"]) as server:
        app = server.client.bind("mail")
        context, short = app.new_context(SYSTEM), app.new_context()
        assert short.call("Hi", temperature=0.0, max_tokens=1)["n_left_out"] == 0
        found = []
        for i in range(10):
            turn = TURNS[i % len(TURNS)]
            streams = i % 2 == 1
            reply = (
                drain(context.stream(turn, **GREEDY))[1]
                if streams
                else context.call(turn, **GREEDY)
            )
            found.append((streams, reply["n_left_out"]))
        assert server.metrics()["llmaas_slides_total"] == sum(n > 0 for _, n in found) >= 2
        listed = server.client.request("GET", "/apps/mail/contexts")
        starts = {item["id"]: item["seen_from"] for item in listed}
        record = context.record()
        assert starts == {short.id: 0, context.id: record["seen_from"]}
        assert record["seen_from"] == 1 + sum(n for _, n in found)
        assert len(record["messages"]) == 21


def test_a_full_context_that_another_model_counted(start, tmp_path):
    """Before a restart, a model with another vocabulary counted so many tokens that none fits."""
    with start() as (service, _):
        context = service.bind("mail").new_context(SYSTEM)
        converse(context, 1)
    with contextlib.closing(sqlite3.connect(tmp_path / "state" / "contexts.sqlite")) as log, log:
        log.execute("UPDATE contexts SET n_tokens=10000")
    with start() as (service, _):
        context = service.bind("mail").context(context.id)
        assert context.call(TURNS[1], **GREEDY).text
        assert context.record().n_tokens < ENGINE["n_ctx"]


def test_a_long_context_in_which_another_model_counted_few_tokens(make_llama, tmp_path):
    window = Window(ServiceConfig(state_dir=tmp_path), make_llama(**ENGINE | {"n_ctx": 1024}))
    turns = [{"role": "user", "content": TURNS[3]}, {"role": "assistant", "content": TURNS[4]}] * 99
    record = ContextRecord("c", "mail", turns, n_tokens=1, n_calls=99)
    messages = [*turns, {"role": "user", "content": TURNS[1]}]
    assert window.start(record, messages, GREEDY, is_counted=True) == 0
    assert window.start(record, messages, GREEDY, is_counted=False) > len(turns) // 2

"""The service in this process, without any plugin: calls, streams, limits."""

from __future__ import annotations

import itertools
import signal
import threading
import time

import pytest
from in_process import ENGINE, GREEDY, TURNS
from llama_cpp import LlamaGrammar
from served import drain, wait_until

from llmaas_hooks import ConfigError, LimitError
from llmaas_plugins.service import LLMService, ServiceConfig


def vanilla_reply(llama, messages):
    reply = llama.create_chat_completion(messages=messages, **GREEDY)["choices"][0]
    return reply["message"]["content"].strip(), reply["finish_reason"]


def test_calls_are_llama_cpps_own_chat_completions(serve, make_llama):
    context = serve().bind("mail").new_context("You are a shy guest.")
    plain = make_llama(**ENGINE)
    messages = [{"role": "system", "content": "You are a shy guest."}]
    for n_calls, turn in enumerate(TURNS, 1):
        reply = context.call(turn, **GREEDY)
        messages.append({"role": "user", "content": turn})
        assert (reply.text, reply.finish_reason) == vanilla_reply(plain, messages)
        messages.append({"role": "assistant", "content": reply.text})
        record = context.record()
        assert (record.messages, record.n_calls) == (messages, n_calls)
        assert record.n_tokens == reply.n_tokens == plain.n_tokens
        assert 0 < reply.first_token_s <= reply.total_s
        assert record.created < record.used


def test_the_system_prompt_is_part_of_the_context(serve):
    app = serve().bind("mail")
    plain, told = app.new_context(), app.new_context("You sell red shoes.")
    prompt = "What do you have?"
    assert told.call(prompt, **GREEDY).n_tokens > plain.call(prompt, **GREEDY).n_tokens
    assert told.record().messages[0] == {"role": "system", "content": "You sell red shoes."}


def test_stream(serve):
    app = serve().bind("mail")
    expected = app.new_context().call(TURNS[0], **GREEDY)
    context = app.new_context()
    pieces, reply = drain(context.stream(TURNS[0], **GREEDY))
    assert len(pieces) > 3
    assert "".join(pieces).strip() == reply.text == expected.text
    assert context.record().messages[-1] == {"role": "assistant", "content": reply.text}


@pytest.mark.parametrize("n_pieces", [0, 1, 5])
def test_a_stream_closed_early_leaves_the_context_as_it_was(serve, n_pieces):
    service = serve()
    undisturbed, context = (service.bind("mail").new_context("Be calm.") for _ in range(2))
    for each in (undisturbed, context):
        each.call(TURNS[0], **GREEDY)
    before = context.record()
    stream = context.stream("Tell me a story.", temperature=0.0, max_tokens=50)
    for _ in range(n_pieces):
        next(stream)
    stream.close()
    assert context.record() == before
    assert service.status()["queue"] == 0
    assert context.call(TURNS[1], **GREEDY).text == undisturbed.call(TURNS[1], **GREEDY).text


def test_a_stream_that_nobody_asks_takes_no_turn(serve):
    service = serve()
    app = service.bind("mail")
    context = app.new_context()
    stream = context.stream(TURNS[0], **GREEDY)
    app.new_context().call(TURNS[0], max_tokens=1)
    context.delete()
    with pytest.raises(LookupError, match=context.id):
        next(stream)


def test_a_stream_may_outlive_the_service(serve):
    service = serve()
    stream = service.bind("mail").new_context().stream(TURNS[0], **GREEDY)
    next(stream)
    service.close()
    stream.close()  # must not look into the closed log


def test_most_recently_called_first(serve):
    app = serve().bind("mail")
    contexts = [app.new_context() for _ in range(3)]
    for i in (1, 2, 0):
        contexts[i].call("Hi", max_tokens=1)
    assert app.contexts() == [contexts[0], contexts[2], contexts[1]]


def test_order_when_the_clock_is_set_back(serve, monkeypatch):
    app = serve().bind("mail")
    clock = itertools.count(2e9, -3600)
    monkeypatch.setattr(time, "time", lambda: next(clock))
    contexts = [app.new_context() for _ in range(3)]
    assert app.contexts() == contexts[::-1]
    for i in (1, 2, 0):
        contexts[i].call("Hi", max_tokens=1)
    assert app.contexts() == [contexts[0], contexts[2], contexts[1]]


def test_an_engine_may_be_given_by_a_function(serve, make_llama):
    made = []

    def engine():
        if not made:
            made.append(make_llama(**ENGINE))
        return made[0]

    service = serve(engine)
    context = service.bind("mail").new_context()
    assert made == []
    assert context.call("Hi", max_tokens=2).n_tokens == made[0].n_tokens


def test_open_loads_a_model(reference_model, tmp_path):
    with LLMService.open(reference_model, ServiceConfig(state_dir=tmp_path)) as service:
        reply = service.bind("mail").new_context().call("Hi", max_tokens=2)
    assert reply.n_tokens > 5


# -- limits ----------------------------------------------------------------------------------------


def test_most_new_tokens(serve):
    context = serve(max_new_tokens=5).bind("mail").new_context()
    before = 0
    for given, expected in (({}, 5), ({"max_tokens": 3}, 3), ({"max_tokens": 9}, 9)):
        pieces, reply = drain(context.stream("Go on", temperature=0.0, **given))
        assert (len(pieces), reply.finish_reason) == (expected, "length")
        assert reply.n_tokens > before
        before = reply.n_tokens


@pytest.mark.parametrize("max_tokens", [100, None, -1])
def test_longest_context(serve, max_tokens):
    context = serve(max_context_tokens=40, at_limit="error").bind("mail").new_context()
    reply = context.call("Tell me a long story.", temperature=0.0, max_tokens=max_tokens)
    assert (reply.finish_reason, reply.n_tokens) == ("length", 40)
    assert context.record().n_tokens == 40
    with pytest.raises(LimitError, match=r"holds 40 tokens.*into 40.*service\.max_context_tokens"):
        context.call("And then?")


def test_a_grammar_that_is_none(serve):
    context = serve().bind("mail").new_context()
    with pytest.raises(ConfigError, match=r"grammar: llama\.cpp cannot"):
        context.call("Hi", grammar=LlamaGrammar.from_string("root ::= ("))
    assert context.record().messages == []
    yes = LlamaGrammar.from_string('root ::= "yes"')
    assert context.call("Hi", grammar=yes, max_tokens=8).text == "yes"


@pytest.mark.parametrize("at_limit", ["slide", "error"])
def test_a_prompt_longer_than_the_longest_context(serve, at_limit):
    service = serve(max_context_tokens=40, at_limit=at_limit)
    context = service.bind("mail").new_context()
    with pytest.raises(LimitError, match="does not fit into 40"):
        context.call("word " * 60)
    assert context.record().messages == []
    assert context.call("Hi", **GREEDY).n_tokens <= 40


@pytest.mark.parametrize("how", ["call", "stream"])
@pytest.mark.parametrize("at_limit", ["slide", "error"])
def test_a_prompt_longer_than_the_engines_context(serve, how, at_limit):
    service = serve(at_limit=at_limit)
    context = service.bind("mail").new_context()
    text = context.call("Hi", **GREEDY).text
    before = context.record()
    with pytest.raises(LimitError, match=rf"{context.id} holds {before.n_tokens} tokens.*n_ctx"):
        list(context.stream("word " * 600)) if how == "stream" else context.call("word " * 600)
    assert context.record() == before
    assert service.bind("mail").new_context().call("Hi", **GREEDY).text == text


def test_a_conversation_that_fills_the_engines_context(serve, make_llama):
    context = serve(make_llama(n_ctx=256), at_limit="error").bind("mail").new_context()
    records = []

    def converse():
        while len(records) < 40:
            records.append(context.record())
            context.call("And then?", temperature=0.0, max_tokens=64)

    with pytest.raises(LimitError, match=r'Start a new context, set service\.at_limit = "slide"'):
        converse()
    assert 200 < context.record().n_tokens <= 256
    assert context.record() == records[-1]  # the refused call changed nothing


def test_most_waiting_calls(serve):
    service = serve(max_queue=1)
    app = service.bind("mail")
    holder, waiter, third = (app.new_context() for _ in range(3))
    stream = holder.stream(TURNS[0], **GREEDY)
    next(stream)
    replies = []
    thread = threading.Thread(target=lambda: replies.append(waiter.call(TURNS[0], **GREEDY)))
    thread.start()
    wait_until(lambda: service.status()["queue"] == 2)
    with pytest.raises(LimitError, match=r"2 calls are running or waiting.*service\.max_queue"):
        third.call("Hi")
    assert replies == []
    _, first = drain(stream)
    thread.join(30)
    assert [reply.text for reply in replies] == [first.text]
    assert third.call(TURNS[0], **GREEDY).text == first.text
    assert service.status()["queue"] == 0


def test_calls_are_served_in_order(serve):
    service = serve()
    app = service.bind("mail")
    stream = app.new_context().stream(TURNS[0], **GREEDY)
    next(stream)
    done, threads = [], []
    for i in range(4):
        context = app.new_context()

        def call(i=i, context=context):
            context.call("Hi", max_tokens=2)
            done.append(i)

        threads.append(threading.Thread(target=call))
        threads[-1].start()
        wait_until(lambda i=i: service.status()["queue"] == i + 2)
    stream.close()
    for thread in threads:
        thread.join(30)
    assert done == [0, 1, 2, 3]


def test_an_interrupted_wait_gives_its_place_up(serve):
    service = serve()
    app = service.bind("mail")
    started, release = threading.Event(), threading.Event()

    def hold(context):
        stream = context.stream(TURNS[0], **GREEDY)
        next(stream)
        started.set()
        release.wait(30)
        stream.close()

    holder = threading.Thread(target=hold, args=(app.new_context(),))
    holder.start()
    started.wait(30)
    impatient, patient = app.new_context(), app.new_context()
    before = impatient.record()

    def interrupt():
        wait_until(lambda: service.status()["queue"] == 2)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    interrupter = threading.Thread(target=interrupt)
    interrupter.start()
    with pytest.raises(KeyboardInterrupt):
        impatient.call("Hi")
    interrupter.join(30)
    assert service.status()["queue"] == 1
    assert impatient.record() == before
    release.set()
    assert patient.call("Hi", max_tokens=2).n_tokens > 0
    holder.join(30)

"""The service closed, deleted from or failing under its calls, and called by many threads."""

from __future__ import annotations

import contextlib
import random
import threading

import pytest
from in_process import ENGINE, GREEDY, TURNS
from served import wait_until

from llmaas_hooks import StoreError
from llmaas_plugins.service import LLMService

# -- closing ---------------------------------------------------------------------------------------


def test_closed_under_its_calls(serve):
    """Waiting calls fail at once, running ones at their next token; nothing is committed."""
    service = serve()
    app = service.bind("mail")
    contexts = [app.new_context("Be calm.") for _ in range(3)]
    errors = []
    endless = {"temperature": 0.0, "repeat_penalty": 0.5, "max_tokens": 450}

    def call(context):
        try:
            context.call("Tell me a story.", **endless)
        except StoreError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=call, args=(context,)) for context in contexts]
    for thread in threads:
        thread.start()
    wait_until(lambda: service.status()["queue"] == 3)
    service.close()
    for thread in threads:
        thread.join(30)
    assert len(errors) == 3
    assert all("service was closed" in error for error in errors)
    assert service.status()["queue"] == 0
    with serve_again(service) as again:
        records = [context.record() for context in again.bind("mail").contexts()]
    assert [(record.n_calls, len(record.messages)) for record in records] == [(0, 1)] * 3


def serve_again(service):
    return LLMService(lambda: None, service.config)


def test_closed_means_away_from_the_engine(serve, make_llama):
    """After ``close``, the engine's owner may close the engine although a stream is open."""
    engine = make_llama(**ENGINE)
    service = serve(engine)
    context = service.bind("mail").new_context()
    stream = context.stream(TURNS[0], **GREEDY)
    next(stream)
    service.close()
    engine.close()
    with pytest.raises(StoreError, match="this call's prompt is not in its context"):
        list(stream)
    for use in (context.record, context.delete, lambda: context.call("Hi")):
        with pytest.raises(StoreError, match="service was closed"):
            use()
    service.close()


# -- trouble ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sampling", "error"),
    [({"temprature": 0.0}, TypeError), ({"logprobs": True, "top_logprobs": 1}, ValueError)],
)
def test_llama_cpps_own_errors_pass(serve, sampling, error):
    service = serve()
    context = service.bind("mail").new_context()
    with pytest.raises(error, match=next(iter(sampling))):
        context.call("Hi", **sampling)
    assert context.record().messages == []
    assert service.status()["queue"] == 0
    assert context.call("Hi", **GREEDY).text


def test_deleted_under_its_call(serve):
    service = serve()
    app = service.bind("mail")
    context = app.new_context()
    stream = context.stream(TURNS[0], **GREEDY)
    next(stream)
    context.delete()
    with pytest.raises(LookupError, match=f"{context.id} was deleted during the call"):
        list(stream)
    assert app.contexts() == []
    assert service.status()["queue"] == 0


def test_two_threads_say_what_one_says(serve):
    subjects = {
        "Anna": ("Tell me about your dog.", "I want to fly to Rome.", "My phone is broken."),
        "Bert": ("It rains today.", "One pizza with cheese, please.", "Do you play football?"),
    }

    def converse(app, name, said):
        contexts = {subject: app.new_context() for subject in subjects[name]}
        for turn in (None, "Why is that?"):
            for subject, context in contexts.items():
                said[subject, turn] = context.call(turn or subject, **GREEDY).text

    serial, parallel = {}, {}
    app = serve().bind("mail")
    for name in subjects:
        converse(app, name, serial)
    app = serve().bind("mail")
    threads = [threading.Thread(target=converse, args=(app, n, parallel)) for n in subjects]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert parallel == serial
    assert len(set(serial.values())) >= 10  # of 12: taking one context for another would show


@pytest.mark.slow
def test_many_threads_call_delete_and_list(serve):
    """A context deleted by another thread raises LookupError in its callers only."""
    service = serve(max_queue=50)
    shared = service.bind("shared")
    expected = service.bind("mail").new_context().call(TURNS[0], **GREEDY).text
    problems = []

    def work(seed):
        rng = random.Random(seed)
        try:
            for _ in range(6):
                own = service.bind(f"app {seed}").new_context()
                shared.new_context()
                if own.call(TURNS[0], **GREEDY).text != expected:
                    problems.append("another text")
                context = rng.choice(shared.contexts())
                with contextlib.suppress(LookupError):
                    context.call("Hi", max_tokens=2)
                with contextlib.suppress(LookupError):
                    context.delete()
                own.delete()
        except Exception as error:
            problems.append(repr(error))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert problems == []
    assert service.status()["queue"] == 0
    assert all(service.bind(f"app {seed}").contexts() == [] for seed in range(6))

"""The service with kv_chunks: switched contexts, restarts, and the traces of deletion."""

from __future__ import annotations

import contextlib
import gc
import threading

import pytest

from llmaas_plugins import activate
from llmaas_plugins.service import LLMService, ServiceConfig

# Evaluate tokens one by one: restored and re-evaluated cells are then equal to the last bit, so
# equal texts can be demanded.
ENGINE = {"n_ctx": 512, "n_ubatch": 1, "n_threads_batch": 1, "flash_attn": True}
GREEDY = {"temperature": 0.0, "max_tokens": 12}
SUBJECTS = ("Tell me about your dog.", "I want to fly to Rome.", "My phone is broken.")
TURNS = ("Why is that?", "I do not believe you.", "What will you do now?")


@pytest.fixture
def start(make_llama, tmp_path):
    """Start the service on the same directories, as after a restart: new suite, new engine."""

    @contextlib.contextmanager
    def start(*plugins):
        table = {"codec": "lossless", "ram_budget": "2 MiB", "store": str(tmp_path / "kv")}
        config = {"on_error": "raise", "plugins": dict.fromkeys(plugins, table)}
        with (
            activate(config) as suite,
            contextlib.closing(make_llama(**ENGINE)) as engine,
            LLMService(engine, ServiceConfig(state_dir=tmp_path / "state")) as service,
        ):
            yield service, lambda: suite.status()["plugins"]["kv_chunks"]

    return start


@pytest.fixture(scope="module")
def expected(reference_model, tmp_path_factory):
    """Return the texts of a service without plugins that is never restarted."""
    folder = tmp_path_factory.mktemp("state")
    options = ENGINE | {"n_threads": 1, "seed": 1}
    with LLMService.open(reference_model, ServiceConfig(state_dir=folder), **options) as service:
        app = service.bind("mail")
        contexts = {subject: app.new_context() for subject in SUBJECTS}
        said = [texts(contexts, turn) for turn in (None, *TURNS)]
    assert len({text for row in said for text in row}) >= 10  # of 12: mix-ups would show
    return said


def texts(contexts, turn):
    """Call every context in turn, so that each call is a switch."""
    return [context.call(turn or name, **GREEDY).text for name, context in contexts.items()]


@pytest.mark.slow
def test_the_reference_does_not_depend_on_the_batches(expected, start):
    with start() as (service, _):
        for i, subject in enumerate(SUBJECTS):
            context = service.bind("mail").new_context()
            found = [context.call(turn or subject, **GREEDY).text for turn in (None, *TURNS)]
            assert found == [row[i] for row in expected]  # without any switch in between


@pytest.mark.parametrize("plugins", [(), ("kv_chunks",)], ids=["vanilla", "kv_chunks"])
def test_contexts_survive_restarts(expected, start, plugins):
    with start(*plugins) as (service, _):
        app = service.bind("mail")
        contexts = {subject: app.new_context() for subject in SUBJECTS}
        assert [texts(contexts, None), texts(contexts, TURNS[0])] == expected[:2]
        records = [context.record() for context in contexts.values()]
    for i, turn in enumerate(TURNS[1:], 2):
        with start(*plugins) as (service, status):
            app = service.bind("mail")
            assert {context.id for context in app.contexts()} == {r.id for r in records}
            assert [app.context(record.id).record() for record in records] == records
            contexts = {s: app.context(r.id) for s, r in zip(SUBJECTS, records, strict=True)}
            assert texts(contexts, turn) == expected[i]
            records = [context.record() for context in contexts.values()]
            if plugins:
                found = status()
                assert (found["restores"], found["contexts"], found["faults"]) == (3, 3, 0)
                assert found["disk_hits"] > 0
                assert found["restored_tokens"] > found["prompt_tokens"] / 2


def test_vanilla_and_plugin_may_take_turns(expected, start):
    with start("kv_chunks") as (service, _):
        app = service.bind("mail")
        contexts = {subject: app.new_context() for subject in SUBJECTS}
        found = [texts(contexts, None)]
    for turn, plugins in zip(TURNS, [(), ("kv_chunks",), ()], strict=True):
        with start(*plugins) as (service, _):
            app = service.bind("mail")
            contexts = {name: app.context(old.id) for name, old in contexts.items()}
            found.append(texts(contexts, turn))
    assert found == expected


def test_threads_with_switches_underneath(expected, start):
    with start("kv_chunks") as (service, status):
        said = {}

        def converse(subject):
            context = service.bind(subject).new_context()
            said[subject] = [
                context.call(turn or subject, **GREEDY).text for turn in (None, *TURNS)
            ]

        threads = [threading.Thread(target=converse, args=(subject,)) for subject in SUBJECTS]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert status()["restores"] > 0
    assert [said[subject] for subject in SUBJECTS] == [
        list(row) for row in zip(*expected, strict=True)
    ]


def test_a_stream_closed_early_leaves_the_cells_usable(expected, start):
    with start("kv_chunks") as (service, _):
        app = service.bind("mail")
        contexts = {subject: app.new_context() for subject in SUBJECTS}
        for i, turn in enumerate((None, *TURNS)):
            for context in contexts.values():
                stream = context.stream("Tell me something else.", temperature=0.0, max_tokens=40)
                for _ in range(i):
                    next(stream)
                stream.close()
            assert texts(contexts, turn) == expected[i]


def test_delete_evicts(expected, start):
    with start("kv_chunks") as (service, status):
        app = service.bind("mail")
        contexts = [app.new_context() for _ in SUBJECTS]
        for subject, context in zip(SUBJECTS, contexts, strict=True):
            context.call(subject, **GREEDY)
        before = status()
        freed = contexts[0].delete()
        after = status()
        assert freed > 0
        assert (before["contexts"], after["contexts"]) == (3, 2)
        assert after["chunks"] < before["chunks"]
        assert contexts[1].call(TURNS[0], **GREEDY).text == expected[1][1]
    with start("kv_chunks") as (service, status):  # and it does not come back
        app = service.bind("mail")
        assert {context.id for context in app.contexts()} == {c.id for c in contexts[1:]}
        for context in app.contexts():
            assert context.delete() > 0
        found = status()
        assert (found["contexts"], found["chunks"]) == (0, 0)
        assert (found["ram_bytes"], found["disk_bytes"]) == (0, 0)


@pytest.mark.parametrize("ending", ["finish", "close"])
def test_deleted_under_its_call_leaves_no_cells(start, ending):
    with start("kv_chunks") as (service, status):
        context = service.bind("mail").new_context()
        context.call(SUBJECTS[0], **GREEDY)
        stream = context.stream(TURNS[0], **GREEDY)
        next(stream)
        context.delete()
        if ending == "close":
            stream.close()
        else:
            with pytest.raises(LookupError, match="deleted during the call"):
                list(stream)
        found = status()
        assert (found["contexts"], found["chunks"]) == (0, 0)


def test_deleted_under_a_stream_that_becomes_garbage(start):
    """The collector ends the stream where no plugin can erase what the call saved."""
    with start("kv_chunks") as (service, status):
        context, other = (service.bind("mail").new_context() for _ in range(2))
        garbage = [context.stream(" ".join(SUBJECTS), **GREEDY)]
        next(garbage[0])
        context.delete()
        garbage.append(garbage)
        del garbage
        gc.collect()
        other.call(" ".join(TURNS), **GREEDY)  # ends the request of the stream
        assert status()["contexts"] == 1


def test_status_has_the_plugins_report(start):
    with start("kv_chunks") as (service, _):
        service.bind("mail").new_context().call(SUBJECTS[0], **GREEDY)
        status = service.status()
        assert status["queue"] == 0
        assert status["plugins"]["kv_chunks"]["requests"] == 1
        assert "Llama.generate" in status["patched"]

"""Grammars and schemas of clients: built and run in another process, within limits."""

from __future__ import annotations

import collections
import contextlib
import functools
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import anyio
import pytest
from fuzzing import Bodies
from soak import scale

pytest.importorskip("fastapi")
from llama_cpp import Llama, _internals, llama_grammar

from llmaas_hooks import serving_context
from llmaas_plugins.server import grammars as module
from llmaas_plugins.server.calls import Call
from llmaas_plugins.server.confinement import confine_grammars
from llmaas_plugins.server.grammars import Grammars, Wanted
from llmaas_plugins.server.refusal import Refusal

GREEDY = {"temperature": 0.0, "max_tokens": 24}
AMBIGUOUS = 'root ::= root2\nroot2 ::= "a" root2 "b" | "a" root2 "c" | "a" root2 "d" | "a"'


@pytest.fixture(scope="module")
def llama(reference_model):
    with contextlib.closing(Llama(str(reference_model), n_ctx=256, verbose=False)) as llama:
        yield llama


@pytest.fixture(scope="module")
def grammars(llama):
    with contextlib.closing(Grammars(lambda: llama)) as grammars:
        yield grammars


@pytest.fixture
def confine(grammars, monkeypatch):
    """Return a function that has llama_cpp run a call's grammars in that process, for one test."""

    def refuse(refusal):
        raise refusal

    monkeypatch.setattr(llama_grammar, "json_schema_to_gbnf", llama_grammar.json_schema_to_gbnf)
    monkeypatch.setattr(_internals.LlamaSampler, "add_grammar", None)
    return functools.partial(confine_grammars, grammars, refuse)


@pytest.fixture
def confined(confine):
    """Have llama_cpp run grammars in that process, for one test."""
    confine(lambda: None)


def schema(**properties):
    required = list(properties)
    return json.dumps({"type": "object", "properties": properties, "required": required})


def items(**limits):
    return json.dumps({"type": "array", "items": {"type": "null"}, **limits})


def nested(n):
    return "root ::= " + "(" * n + '"a"' + ")" * n


HOSTILE = {
    "escapes": ("schema", schema(price={"type": "string", "pattern": "^\\$[0-9]+$"})),
    "long": ("schema", schema(summary={"type": "string", "maxLength": 2000})),
    "longer": ("schema", schema(summary={"type": "string", "minLength": 10**9})),
    "many": (
        "schema",
        items(maxItems=100_000),
    ),
    "too many": (
        "schema",
        items(minItems=3 * 10**8),
    ),
    "endless": ("schema", json.dumps({"type": "string", "pattern": "^[^]]$"})),
    "nested": ("grammar", nested(30_000)),
    "no grammar": ("grammar", "root ::= ("),
    "no root": ("grammar", 'other ::= "a"'),
    "left recursion": ("grammar", 'root ::= root "a"'),
    "repetition": ("grammar", "root ::= " + "(" * 5 + '"a"' + "{2000}){2000}" * 4 + "){2000}"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTILE)
def test_what_costs_too_much_or_cannot_be_built_is_refused(grammars, name):
    started = time.monotonic()
    with pytest.raises(Refusal, match=r"^field: ") as caught:
        grammars.check([Wanted("field", *HOSTILE[name])])
    assert caught.value.status == 400
    assert "\n" not in str(caught.value)
    assert time.monotonic() - started < 20  # bounded; a busy machine takes longer
    grammars.check([Wanted("field", "grammar", 'root ::= "yes" | "no"')])


def test_a_schema_that_the_converter_does_not_know_is_left_to_llama_cpp(grammars):
    unknown = json.dumps({"$ref": "https://127.0.0.1:1/x"})
    grammars.check([Wanted("field", "schema", unknown)])
    with pytest.raises(ValueError, match="remote"):
        grammars.converted(unknown)


def test_verdicts_are_kept_but_not_all_of_them(grammars, monkeypatch):
    monkeypatch.setattr(module, "_MOST_KEPT", 2)
    texts = [f'root ::= "{i}"' for i in range(3)]
    for text in texts:
        grammars.check([Wanted("", "grammar", text)])
    assert len(grammars._known) == 2
    monkeypatch.setattr(grammars, "_job", None)  # no process is asked
    for text in texts[1:]:
        grammars.check([Wanted("", "grammar", text)])


def test_a_verdict_is_kept_for_the_app_that_asked_alone(grammars, monkeypatch):
    wanted = [Wanted("", "grammar", 'root ::= "secret of mail"')]
    with serving_context(None, "mail"):
        grammars.check(wanted)
    asked, job = [], grammars._job
    monkeypatch.setattr(grammars, "_job", lambda what: asked.append(what) or job(what))
    for app in ("game", None, "mail", "game"):
        with serving_context(None, app):
            grammars.check(wanted)
    assert len(asked) == 2  # of game and of no app, once each


@pytest.mark.parametrize(
    "text",
    [llama_grammar.JSON_GBNF, 'root ::= [a-z ]+ "."', llama_grammar.LIST_GBNF, 'root ::= "yes"'],
)
@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 0.9, "seed": 3}])
def test_texts_are_those_of_grammars_in_the_process(llama, grammars, request, text, sampling):
    def complete():
        grammar = llama_grammar.LlamaGrammar.from_string(text)
        llama.reset()
        options = GREEDY | sampling
        return llama.create_completion("Once upon", grammar=grammar, **options)["choices"]

    expected = complete()
    request.getfixturevalue("confined")
    assert complete() == expected
    assert grammars._running


def test_grammars_run_beside_each_other(grammars):
    """Calls that are decoded together, or interrupt each other, have a grammar each."""
    texts = [f'root ::= "{letter}"+' for letter in "ab"]
    with contextlib.ExitStack() as opened:
        running = [opened.enter_context(contextlib.closing(grammars.run(text))) for text in texts]
        for one, other in (running, running[::-1], running):
            one.prepare()
            other.prepare()
            (letter, *_) = (one._allowed & ~other._allowed).nonzero()[0].tolist()
            one.accept(letter)


def test_grammars_begin_while_others_are_closed(monkeypatch):
    """Calls begin on the engine's thread while the event loop's thread stops the service."""
    grammars, ended = Grammars(lambda: SimpleNamespace(n_vocab=lambda: 8)), []
    held = collections.deque(maxlen=64)  # of the last calls: closing all takes no longer and longer
    monkeypatch.setattr(grammars, "_job", lambda _: SimpleNamespace(close=lambda: None))

    def begin():
        try:
            while not ended:
                held.append(grammars.run(""))
        finally:
            held.clear()

    thread = threading.Thread(target=begin)
    thread.start()
    try:
        for _ in range(2000):
            grammars.close()
    finally:
        ended.append(True)
        thread.join(60)


def test_a_grammar_ends_with_its_call_or_its_next_one(llama, grammars, confine):
    async def call():
        return Call("mail")

    caller = anyio.run(call)
    confine(lambda: caller)
    for text in ('root ::= "a"', 'root ::= "b"'):
        before, grammar = caller.grammar, llama_grammar.LlamaGrammar.from_string(text)
        llama.create_completion("Once", grammar=grammar, **GREEDY)
        assert caller.grammar._connection.fileno() >= 0
        assert before is None or before._connection.fileno() < 0
    last = caller.grammar
    caller.constrain(None)
    assert last._connection.fileno() < 0


@pytest.mark.usefixtures("confined")
def test_a_schema_becomes_a_grammar(llama):
    properties = {"yes": {"type": "boolean"}}
    found = llama.create_chat_completion(
        [{"role": "user", "content": "Is it?"}],
        response_format={"type": "json_object", "schema": json.loads(schema(**properties))},
        **GREEDY,
    )
    assert json.loads(found["choices"][0]["message"]["content"])["yes"] in (True, False)


@pytest.mark.usefixtures("confined")
@pytest.mark.parametrize("text", [nested(30_000), "root ::= (", AMBIGUOUS])
def test_what_was_not_found_before_ends_the_call_only(llama, text):
    """The text kills the process that builds it, or costs more with each token."""
    grammar = llama_grammar.LlamaGrammar.from_string(text)
    with pytest.raises(Refusal, match="grammar: it needs more"):
        llama.create_completion("aaaa", grammar=grammar, temperature=0.0, max_tokens=200)
    assert llama.create_completion("Once", **GREEDY)["choices"][0]["text"]


_LARGE = """
import sys
import numpy as np
from llmaas_plugins.server import grammar_worker as worker
from llama_cpp.llama_grammar import JSON_GBNF
found = worker.Vocabulary(sys.argv[1])
n_tokens, n_times = found.n_tokens, 96
found._candidates = (found.lib.llama_token_data * (n_tokens * n_times))()
found.view = np.frombuffer(found._candidates, found.view.dtype)
found.array.data, found.array.size = found._candidates, n_tokens * n_times
found.ids = np.tile(found.ids, n_times)
found.lengths = np.tile(found.lengths, n_times)
found.ends = np.append(found.ends, np.ones(n_tokens * (n_times - 1), bool))  # none is accepted
assert "grammar" in worker._checked(found, worker.step_budget(found), "grammar", JSON_GBNF)
"""


@pytest.mark.slow
def test_json_is_accepted_with_any_vocabulary_and_processor(reference_model):
    """With 400,000 tokens, each step of any grammar takes more than 50 ms."""
    command = [sys.executable, "-c", _LARGE, str(reference_model)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.soak
def test_accepted_ones_cost_little(llama, grammars):
    """The kernel ends costlier ones, so this measures how long a call waits."""
    chance = random.Random(1)
    n_accepted, waited_s = 0, []
    for seed in range(scale(40, 4000)):
        text = Bodies(seed).sound_rule()
        with contextlib.suppress(Refusal):
            grammars.check([Wanted("", "grammar", text)])
            n_accepted += 1
            with contextlib.closing(grammars.run(text)) as running:
                for _ in range(20):
                    started = time.perf_counter()
                    running.prepare()
                    waited_s.append(time.perf_counter() - started)
                    running.accept(int(chance.choice(running._allowed.nonzero()[0])))
    assert n_accepted >= 20
    assert statistics.median(waited_s) < 0.05


def test_an_end_that_somebody_else_made_is_no_verdict(grammars, monkeypatch):
    """A machine short of memory kills the check; the same grammar is accepted later."""

    def killed(_):
        ours, theirs = socket.socketpair()
        theirs.close()
        return ours

    wanted = Wanted("", "schema", schema(killed={"type": "boolean"}))
    with monkeypatch.context() as patch:
        patch.setattr(grammars, "_job", killed)
        for use in (lambda: grammars.check([wanted]), lambda: grammars.converted(wanted.text)):
            with pytest.raises(Refusal, match="it needs more"):
                use()
    grammars.check([wanted])
    assert "killed" in grammars.converted(wanted.text)


def test_a_worker_that_has_ended_is_started_again(grammars):
    wanted = Wanted("", "grammar", 'root ::= "again"')
    grammars.check([Wanted("", "grammar", 'root ::= "first"')])
    grammars._worker._process.kill()
    grammars._worker._process.wait()
    grammars.check([wanted])


def test_its_process_ends_with_it(llama):
    with contextlib.closing(Grammars(lambda: llama)) as grammars:
        running = grammars.run('root ::= "a"+')
        running.prepare()
        pid = grammars._worker._process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        assert children
    deadline = time.monotonic() + 20
    running.close()
    while any(_runs(int(child)) for child in [pid, *children]):
        assert time.monotonic() < deadline
        os.sched_yield()


def test_nothing_is_left_of_a_process_that_had_nothing_to_do(llama, monkeypatch):
    monkeypatch.setattr(module.worker, "IDLE_S", 0.1)
    wanted = [Wanted("", "grammar", f'root ::= "{i}"') for i in range(2)]
    with contextlib.closing(Grammars(lambda: llama)) as grammars:
        grammars.check(wanted[:1])
        process = Path(f"/proc/{grammars._worker._process.pid}")
        deadline = time.monotonic() + 20
        while process.exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        grammars.check(wanted[1:])


def _runs(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def test_a_model_whose_vocabulary_was_changed_on_loading(reference_model):
    changed = {"tokenizer.ggml.eos_token_id": 7}
    with (
        contextlib.closing(
            Llama(str(reference_model), n_ctx=64, verbose=False, kv_overrides=changed)
        ) as llama,
        contextlib.closing(Grammars(lambda: llama)) as grammars,
        pytest.raises(Refusal, match="kv_overrides") as caught,
    ):
        grammars.check([Wanted("", "grammar", 'root ::= "a"')])
    assert caught.value.status == 503

"""Calls that are decoded together answer as alone, and none keeps the others waiting."""

from __future__ import annotations

import contextlib
import functools
import json
import signal
import socket
import string
import threading
import urllib.error
import urllib.request

import pytest
from batched import GREEDY, PROMPTS, at_once, batches, one_by_one, streamed
from served import ENDLESS, LONG_N_CTX, completion, completion_text, drain, serving, wait_until
from soak import scale

pytest.importorskip("fastapi")

CONFIG = """
on_error = "raise"
[service]
state_dir = "state"
most_together = {most}
client_timeout_s = {timeout_s}
shutdown_grace_s = 0
[plugins.kv_chunks]
codec = "{codec}"
store = "kv"
parked_tokens = {parked}
"""
LONG = ENDLESS | {"max_tokens": 600}
AWHILE = ENDLESS | {"max_tokens": 250}
"""Long enough that other calls come and go meanwhile, and all of it is awaited."""


def together(folder, most=4, codec="int8", parked=0, timeout_s=30, **engine):
    """Start a server whose batches are evaluated token by token, as those of calls alone."""
    config = CONFIG.format(most=most, codec=codec, parked=parked, timeout_s=timeout_s)
    return serving(folder, config=config, n_ctx=LONG_N_CTX, **engine)


FEW = (completion_text, "int8", 0), (streamed, "tolerance", 4096)
"""Each option once; tests of other combinations are slow."""
PAIRS = (
    *FEW,
    *((completion_text, "tolerance", 4096), (streamed, "int8", 0)),
    *((completion_text, "int8", 4096), (streamed, "tolerance", 0)),
)
"""Each two options together."""
ALL = (*PAIRS, (completion_text, "tolerance", 0), (streamed, "int8", 4096))


@pytest.mark.parametrize(
    ("ask", "codec", "parked"),
    [
        pytest.param(*one, marks=() if one in FEW else (pytest.mark.slow, pytest.mark.soak))
        for one in scale(PAIRS, ALL)
    ],
)
def test_answers_are_those_of_calls_alone(tmp_path, codec, parked, ask):
    bodies = [GREEDY | {"prompt": prompt} for prompt in PROMPTS]
    bodies.append(GREEDY | {"prompt": "Hello", "temperature": 0.9, "seed": 3, "max_tokens": 8})
    with together(tmp_path, codec=codec, parked=parked) as server:
        alone = [completion_text(server, body) for body in bodies]
        assert batches(server) == (0, 0)
        for _ in range(2):
            assert at_once(*(lambda b=body: ask(server, b) for body in bodies)) == alone
        n_batches, n_tokens = batches(server)
        assert n_tokens > 1.5 * n_batches > 0
        server.wait_until_idle()
        assert server.metrics()["llmaas_queue_running_calls"] == 0
        assert [completion_text(server, body) for body in bodies] == alone
        assert server.stop() == 0


SUBJECTS = (
    *("My sister and I", "Music for tonight", "A hotel in Paris"),
    *("My bank account", "The bus to York"),
)
SURE = GREEDY | {"max_tokens": 16}
"""No token of these answers is less than 0.11 above the next likely one in the logits. Batches of
other sizes shift them by up to 0.1, also in llama.cpp itself."""


@pytest.mark.parametrize("codec", ["int8", pytest.param("tolerance", marks=pytest.mark.slow)])
def test_contexts_are_saved_as_alone(tmp_path, codec):
    """Contexts go on as those of calls alone, from the cells that were saved."""
    found = {}
    for most in (1, 4):
        folder = tmp_path / str(most)
        folder.mkdir()
        with together(folder, most=most, codec=codec) as server:
            app = server.client.bind("mail")
            contexts = [app.new_context(f"{subject} is what you say.") for subject in SUBJECTS]
            asks = [
                [lambda c=context, p=prompt: c.call(p, **SURE) for context in contexts]
                for prompt in ("What is next?", "Thank you.")
            ]
            answers = at_once(*asks[0]) if most > 1 else one_by_one(server, asks[0])
            answers += one_by_one(server, asks[1])
            found[most] = [(answer["text"], answer["n_tokens"]) for answer in answers]
            found[most] += [context.record()["messages"] for context in contexts]
            assert server.kv()["restores"] >= len(contexts)
            assert most == 1 or batches(server)[0] > 0
    for together_, alone in zip(found[4], found[1], strict=True):
        assert together_ == alone


def test_streams_of_contexts(tmp_path):
    with together(tmp_path) as server:
        app = server.client.bind("mail")

        def ask(prompt):
            pieces, reply = drain(app.new_context().stream(prompt, **GREEDY | {"max_tokens": 12}))
            assert "".join(pieces).strip() == reply["text"]
            return reply["text"]

        asks = [lambda p=f"{prompt}? {prompt}!": ask(p) for prompt in PROMPTS[:4]]
        first, second = one_by_one(server, asks), one_by_one(server, asks)
        assert [context.delete() > 0 for context in app.contexts()]
        completion_text(server, GREEDY | {"prompt": "Some other text", "max_tokens": 1})
        assert at_once(*asks) in (first, second)
        assert batches(server)[0] > 0


def test_grammars_and_samplers_are_those_of_each_call(tmp_path):
    digits = {"grammar": 'root ::= [0-9 ]+ "."', "max_tokens": 30}
    capitals = {"grammar": 'root ::= [A-Z ]+ "."', "max_tokens": 30}
    penalized = {"frequency_penalty": 1.5, "presence_penalty": 0.5}
    sampled = {"temperature": 1.2, "seed": 9, "max_tokens": 8}  # long texts hang on the last bits
    kinds = (digits, penalized, {"stop": ["and"]}, capitals, sampled)
    bodies = [GREEDY | {"prompt": p} | kind for p, kind in zip(PROMPTS, kinds, strict=False)]
    with together(tmp_path) as server:
        alone = [completion_text(server, body) for body in bodies]
        assert alone[0].strip("0123456789 .") == ""
        assert alone[3].strip(string.ascii_uppercase + " .") == ""
        for ask in (completion_text, streamed):
            assert at_once(*(lambda b=body, a=ask: a(server, b) for body in bodies)) == alone
        assert batches(server)[0] > 0


@pytest.mark.slow
def test_a_client_that_leaves(tmp_path):
    with together(tmp_path) as server:
        alone = completion_text(server, GREEDY | {"prompt": PROMPTS[0]})
        for _ in range(5):
            with completion(server, LONG | {"prompt": PROMPTS[1], "stream": True}) as leaving:
                assert leaving.readline().startswith(b"data: ")
                others = threading.Thread(
                    target=completion_text, args=(server, AWHILE | {"prompt": PROMPTS[2]})
                )
                others.start()
                assert leaving.readline() is not None
            assert completion_text(server, GREEDY | {"prompt": PROMPTS[0]}) == alone
            others.join(120)
        server.wait_until_idle()
        assert server.stop() == 0


def test_nobody_waits_for_a_client_that_does_not_read(tmp_path):
    with together(tmp_path, timeout_s=20) as server:
        alone = completion_text(server, GREEDY | {"prompt": PROMPTS[0]})
        body = json.dumps(ENDLESS | {"prompt": PROMPTS[1], "stream": True}).encode()
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            client.connect(("127.0.0.1", server.port))
            head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            client.sendall(head.encode() + body)
            wait_until(lambda: server.status()["queue"] == 1)
            for _ in range(3):
                assert completion_text(server, GREEDY | {"prompt": PROMPTS[0]}) == alone
        server.wait_until_idle()


def test_a_context_is_deleted_while_others_answer(tmp_path):
    with together(tmp_path) as server:
        app = server.client.bind("mail")
        alone = completion_text(server, GREEDY | {"prompt": PROMPTS[0]})
        context, other = app.new_context(), app.new_context()
        stream = other.stream("Tell me a story.", **LONG | {"max_tokens": 200})
        next(stream)
        context.call("Hello", max_tokens=3)
        context.delete()
        assert completion_text(server, GREEDY | {"prompt": PROMPTS[0]}) == alone
        drain(stream)
        assert [found.id for found in app.contexts()] == [other.id]


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_the_service_stops_in_the_middle(tmp_path, how):
    with together(tmp_path) as server:
        errors = []

        def ask(prompt):
            with contextlib.suppress(urllib.error.HTTPError, OSError):
                errors.append(
                    completion_text(server, LONG | {"prompt": prompt, "max_tokens": 1900})
                )

        threads = [threading.Thread(target=ask, args=(prompt,)) for prompt in PROMPTS]
        for thread in threads:
            thread.start()
        wait_until(lambda: batches(server)[0] > 5)
        assert server.stop(how) == 0
        for thread in threads:
            thread.join(60)
        assert "Traceback" not in server.log()


@pytest.mark.slow
def test_calls_with_promises_go_first(tmp_path):
    config = CONFIG.format(most=4, codec="int8", parked=0, timeout_s=30)
    with serving(tmp_path, config=config + "[plugins.deadlines]\n", n_ctx=LONG_N_CTX) as server:
        alone = completion_text(server, GREEDY | {"prompt": PROMPTS[0]})
        soon = GREEDY | {"prompt": PROMPTS[0], "slo": {"ttft": "5 s"}}
        with completion(server, LONG | {"prompt": PROMPTS[1], "stream": True}) as stream:
            stream.readline()
            assert at_once(*[lambda: completion_text(server, soon)] * 3) == [alone] * 3
        server.wait_until_idle()
        long = [
            threading.Thread(target=completion_text, args=(server, AWHILE | {"prompt": p}))
            for p in PROMPTS
        ]
        for thread in long:
            thread.start()
        wait_until(lambda: server.status()["queue"] == len(long))
        assert (
            completion_text(server, soon) == alone
        )  # before the four that run, and the one that waits
        assert server.status()["queue"] >= len(long)
        for thread in long:
            thread.join(120)
        server.wait_until_idle()
        n_batches, _ = batches(server)
        assert completion_text(server, soon) == alone
        assert batches(server)[0] == n_batches


@pytest.mark.slow
@pytest.mark.parametrize(("tpot", "shares"), [("9 s", True), ("1 ms", False)])
def test_calls_with_promises_share_batches_that_keep_them(tmp_path, tpot, shares):
    config = CONFIG.format(most=4, codec="int8", parked=0, timeout_s=30)
    with serving(tmp_path, config=config + "[plugins.deadlines]\n", n_ctx=LONG_N_CTX) as server:
        body = GREEDY | {"prompt": PROMPTS[0], "max_tokens": 40}
        alone = completion_text(server, body)
        others = [
            threading.Thread(target=completion_text, args=(server, AWHILE | {"prompt": prompt}))
            for prompt in PROMPTS[1:3]
        ]
        for thread in others:
            thread.start()
        wait_until(lambda: batches(server)[0] > 5)
        assert completion_text(server, body | {"slo": {"tpot": tpot}}) == alone
        n_alone = server.status()["together"]["alone"]
        assert n_alone <= 2 if shares else n_alone >= 30
        for thread in others:
            thread.join(120)


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("parked", [0, 2048])
def test_interrupted_calls_and_calls_aside_keep_their_own_cells(tmp_path, parked):
    """Calls with promises are interrupted while others lie aside, and those interrupt them.

    Only calls without promises answer as alone: those that are interrupted get their cells back
    with eight bits.
    """
    config = CONFIG.format(most=3, codec="int8", parked=parked, timeout_s=30)
    config = config.replace("shutdown_grace_s", "longest_overtaken_s = 0.2\nshutdown_grace_s")
    config += "[plugins.deadlines]\n"
    asked = GREEDY | {"max_tokens": 120}
    promises = [{"tpot": "9 s"}, None, {"ttft": "50 ms"}, None, {"ttft": "9 s"}, {"ttft": "60 ms"}]
    bodies = [
        asked | {"prompt": prompt} | ({} if promise is None else {"slo": promise})
        for prompt, promise in zip([*PROMPTS, "The sun"], promises, strict=True)
    ]
    with serving(tmp_path, config=config, n_ctx=LONG_N_CTX) as server:
        alone = [completion_text(server, body) for body in bodies]
        for _ in range(scale(2, 10)):
            found = at_once(*[functools.partial(completion_text, server, body) for body in bodies])
            for body, answer, expected in zip(bodies, found, alone, strict=True):
                assert answer == expected or "slo" in body
                assert answer[:12] == expected[:12]
        assert server.status()["interruptions"] > 0
        assert batches(server)[0] > 0


def test_bit_equality_is_kept_where_it_is_promised(tmp_path):
    with together(tmp_path, codec="lossless") as server:
        assert "lossless" in server.status()["together"]["why_alone"]
        assert "service.most_together = 4 has no effect" in server.log()
        at_once(*(lambda p=p: completion_text(server, GREEDY | {"prompt": p}) for p in PROMPTS))
        assert batches(server) == (0, 0)


def test_options_that_keep_calls_alone(tmp_path):
    with together(tmp_path, logits_all=True) as server:
        assert server.status()["together"]["why_alone"].startswith("--logits_all needs")
        at_once(*(lambda p=p: completion_text(server, GREEDY | {"prompt": p}) for p in PROMPTS[:2]))
        assert batches(server) == (0, 0)

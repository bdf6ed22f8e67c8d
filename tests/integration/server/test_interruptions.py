"""Calls that are due soon go before the rest of long ones, which answer as without them."""

from __future__ import annotations

import json
import threading
import urllib.request

import pytest
from served import ENDLESS, LONG_N_CTX, completion, completion_text, drain, serving

pytest.importorskip("fastapi")

CONFIG = """
on_error = "raise"
[service]
state_dir = "state"
{service}
[plugins.deadlines]
[plugins.kv_chunks]
codec = "lossless"
store = "kv"
"""
LONG = {"prompt": "Once upon a time", "slo": {"tpot": "2 s"}, "seed": 3} | ENDLESS
LONG["max_tokens"] = 150
SHORT = {"prompt": "The dog", "max_tokens": 4, "slo": {"ttft": "500 ms"}, "temperature": 0.0}


@pytest.fixture
def server(tmp_path):
    with serving(tmp_path, config=CONFIG.format(service=""), n_ctx=LONG_N_CTX) as server:
        yield server


def streamed(server, body, at_first=lambda: None):
    """Return the text of a stream; call a function after its first event."""
    found = []
    with completion(server, body | {"stream": True}) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                found.append(json.loads(line[6:])["choices"][0]["text"])
                if len(found) == 1:
                    at_first()
    return "".join(found)


def test_a_long_answer_is_interrupted(server):
    alone, short = completion_text(server, LONG), completion_text(server, SHORT)
    done = []

    def ask():
        done.append(completion_text(server, SHORT))

    threads = [threading.Thread(target=ask) for _ in range(3)]

    def start():
        for thread in threads:
            thread.start()
            thread.join()
        assert done == [short] * 3  # all of them before the rest of the long answer

    assert streamed(server, LONG, start) == alone
    status = server.status()
    assert status["interruptions"] >= 1
    assert server.metrics()["llmaas_interruptions"] == status["interruptions"]
    assert server.metrics()["llmaas_interrupted_calls"] == 0
    assert completion_text(server, LONG) == alone
    server.wait_until_idle()


def test_calls_in_contexts_are_interrupted_too(server):
    app = server.client.bind("mail")
    contexts = [app.new_context() for _ in range(3)]
    options = {"temperature": 0.0, "seed": 3}
    long = ENDLESS | {"max_tokens": 200, "slo": {"tpot": "2 s"}}
    alone = contexts[0].call("Tell me a story.", **long)
    stream = contexts[1].stream("Tell me a story.", **long)
    pieces = [next(stream)]
    # a second call in the long one's context waits for its end, one elsewhere does not
    later = []
    thread = threading.Thread(
        target=lambda: later.append(contexts[1].call("Go on.", max_tokens=3, **options))
    )
    thread.start()
    reply = contexts[2].call("Hello", slo={"ttft": "500 ms"}, max_tokens=3, **options)
    assert reply["n_tokens"] > 0
    assert not later
    rest, end = drain(stream)
    assert "".join(pieces + rest).strip() == end["text"] == alone["text"]
    thread.join()
    assert [m["role"] for m in contexts[1].record()["messages"]] == ["user", "assistant"] * 2
    assert server.status()["interruptions"] >= 1


def test_a_client_that_leaves_an_interrupted_call(server):
    stream = completion(server, LONG | {"stream": True})
    assert stream.readline().startswith(b"data: ")
    second = completion(server, LONG | {"stream": True, "slo": {"ttft": "500 ms", "tpot": "20 ms"}})
    assert second.readline().startswith(b"data: ")
    stream.close()
    second.close()
    server.wait_until_idle()
    assert completion_text(server, SHORT)
    assert server.stop() == 0


def test_calls_in_the_order_of_arrival_are_not_interrupted(tmp_path):
    config = CONFIG.format(service='schedule = "fifo"')
    with serving(tmp_path, config=config, n_ctx=LONG_N_CTX) as server:
        short = threading.Thread(target=completion_text, args=(server, SHORT))
        streamed(server, LONG, short.start)
        short.join()
        assert server.status()["interruptions"] == 0


def test_the_interface_describes_levels(server):
    with urllib.request.urlopen(f"{server.address}/openapi.json", timeout=60) as answer:
        found = json.loads(answer.read())
    level = found["components"]["schemas"]["CallBody"]["properties"]["level"]
    assert [one["type"] for one in level["anyOf"]] == ["number", "object"]

"""Missed promises: each is said, by an answer as a whole and by one that is streamed."""

from __future__ import annotations

import contextlib
import json
import time
import urllib.request

import openai
import pytest
from leveled import write_times
from llama_cpp import Llama
from preparing import prepare
from served import serving
from switching import PROMPT, ask

from llmaas_hooks import hookimpl, request_scope
from llmaas_plugins import activate, deadlines
from llmaas_plugins.elastic import latency

NOTES = b": x-llmaas-notes: "
HOPELESS = {"ttft": "0.01 ms", "tpot": "100 s"}
"""No machine is so fast."""


class Slow:
    """Plugin that delays each batch once it is told to, by a clock that it sets forward."""

    def __init__(self):
        self.seconds, self.now = 0.0, time.perf_counter
        self.delay_s = 0.0

    def clock(self):
        return self.now() + self.delay_s

    @hookimpl
    def llmaas_decode(self):
        self.delay_s += self.seconds


def test_a_machine_that_becomes_slow_misses_promises_unexpectedly(
    reference_model, tmp_path, monkeypatch
):
    monkeypatch.setattr(latency, "DIRECTORY", tmp_path / "latency")
    slow = Slow()
    monkeypatch.setattr("time.perf_counter", slow.clock)
    model = prepare(reference_model, tmp_path / "model.gguf", tables=("uniform",))
    write_times(model)
    config = {"on_error": "raise", "plugins": {"elastic": {}, "deadlines": {}}}
    own = {"n_ctx": 256, "verbose": False, "n_threads": 1, "n_threads_batch": 1}
    with (
        activate(config, {"slow": slow}) as suite,
        contextlib.closing(Llama(str(model), **own)) as llama,
        deadlines.slo(ttft="60 s", tpot="60 s"),
    ):

        def notes(i):
            llama.reset()
            with request_scope.noting() as found:
                ask(llama, [1, 400 + i, *PROMPT[2:]], 3)
            return found["deadlines"]

        usual = map(notes, range(100))  # at first, the model is not identified
        planned = next(one for one in usual if one["tpot"]["expected_ms"] is not None)
        assert planned["missed"] == planned["infeasible"] == []
        slow.seconds = 90.0
        found = notes(100)
        assert (found["missed"], found["infeasible"]) == (["ttft", "tpot"], [])
        assert found["tpot"]["expected_ms"] < found["tpot"]["promised_ms"] == 60_000
        assert found["tpot"]["measured_ms"] > 90_000
        counts = suite.status()["plugins"]["deadlines"]["requests"]
        assert (counts["missed"], counts["unexpected"]) == (1, 1)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    config = '[service]\nstate_dir = "state"\n[plugins.deadlines]\n'
    with serving(tmp_path_factory.mktemp("served"), config=config, n_ctx=256) as server:
        yield server


def lines_of(server, path, body):
    """Return the lines of a stream."""
    request = urllib.request.Request(
        f"{server.address}{path}",
        json.dumps(body | {"stream": True, "slo": HOPELESS}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert "X-LLMaaS-Notes" not in answer.headers
        return [line.strip() for line in answer if line.strip()]


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/completions", {"prompt": "Hello", "max_tokens": 4}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}]}),
        ("/v1/completions", {"prompt": "Hello", "max_tokens": 40, "stop": ["e"]}),
    ],
)
def test_a_stream_ends_with_its_notes(server, path, asked):
    *_, notes, end = lines_of(server, path, {"max_tokens": 4} | asked)
    assert end == b"data: [DONE]"
    assert notes.startswith(NOTES)
    found = json.loads(notes.removeprefix(NOTES))["deadlines"]
    assert found["missed"] == ["ttft"]
    assert found["ttft"]["measured_ms"] > found["ttft"]["promised_ms"] == 0.01
    requests = server.status()["plugins"]["deadlines"]["requests"]
    assert requests["missed"] == requests["unexpected"] == requests["promised"]


def test_a_stream_in_a_context_has_them_in_its_last_event(server):
    context = server.client.bind("mail").new_context()
    path = f"/v1/llmaas{context._path}/call"
    *_, name, done = lines_of(server, path, {"prompt": "Hello", "max_tokens": 4})
    assert name == b"event: done"
    reply = json.loads(done.removeprefix(b"data: "))
    assert reply["notes"]["deadlines"]["missed"] == ["ttft"]


def test_openais_client_reads_such_streams(server):
    asked = {"model": "any", "max_tokens": 4, "temperature": 0, "seed": 1}
    late = {"extra_body": {"slo": HOPELESS}}
    with openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0) as client:

        def text(**more):
            found = client.completions.create(prompt="Hello", **asked, **more)
            return "".join(one.choices[0].text for one in found) if "stream" in more else found

        whole = text().choices[0].text
        assert [text(stream=True), text(stream=True, **late), text(**late).choices[0].text] == [
            whole
        ] * 3
        turns = [{"role": "user", "content": "Hello"}]
        chat = client.chat.completions.create(messages=turns, stream=True, **asked, **late)
        assert "".join(one.choices[0].delta.content or "" for one in chat)
    server.wait_until_idle()

"""One server under malformed bodies: it answers each one and continues unharmed.

A failure names the seed and the body; ``LLMAAS_FUZZ_SEED=n`` sends only that seed's bodies.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os

import pytest
from fuzzing import COMPLETION, Bodies
from served import serving
from soak import SOAKING, scale

pytest.importorskip("fastapi")

BATCH = 50
SERVICE = "max_contexts_per_app = 1000000"
N_BODIES = scale(200, 5000)
ONLY = os.environ.get("LLMAAS_FUZZ_SEED")
PARTS = range(20 if SOAKING else 1)
KNOWN = {"prompt": "Once upon a time", "max_tokens": 12, "temperature": 0.0}
REFUSED = {400, 404, 413, 422, 429}
LONGEST_S = 60  # allowance for a busy machine; the server bounds CPU time


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fuzz")
    with serving(
        folder, "--chat_format", "chatml-function-calling", n_ctx=256, service=SERVICE
    ) as server:
        yield server
        assert server.stop() == 0
        assert "Traceback" not in server.log()


def post(server, path, body):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=LONGEST_S)
    with contextlib.closing(connection):
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read(), answer.headers["content-type"]


def known_answer(server):
    status, found, _ = post(server, COMPLETION, json.dumps(KNOWN))
    assert status == 200
    return json.loads(found)["choices"][0]["text"]


@contextlib.contextmanager
def fresh_context(server):
    context = server.client.bind("fuzz").new_context()
    try:
        yield context.id
    finally:
        context.delete()


def check(server, seed):
    path, body = Bodies(seed).request()
    try:
        with fresh_context(server) if "{context}" in path else contextlib.nullcontext() as context:
            status, found, kind = post(server, path.format(context=context), body)
        text = found.decode()
        if status in REFUSED:
            message = json.loads(text)["error"]["message"]
            assert message
            assert "\n" not in message
        elif kind.startswith("text/event-stream"):
            assert status == 200
            assert any(end in text for end in ("[DONE]", "event: done", "event: error"))
            assert "server_error" not in text
        else:
            assert status in (200, 201)
            json.loads(text)
    except Exception as error:
        pytest.fail(f"seed {seed}: {error!r}: {path} {body[:2000]!r}: {server.log()[-2000:]}")


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("part", PARTS)
def test_bodies_that_nobody_should_send(server, part):
    expected, process = known_answer(server), server.process.pid
    seeds = range(part * N_BODIES, (part + 1) * N_BODIES) if ONLY is None else [int(ONLY)]
    for seed in seeds:
        check(server, seed)
        if seed % BATCH == 0:
            assert known_answer(server) == expected, seed
    assert known_answer(server) == expected
    assert server.process.poll() is None
    assert server.process.pid == process

"""Clients of ``llmaas serve`` that die, leave or do not read: the next one is served at once."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import threading

import fork_server
import pytest
from served import ENDLESS, LONG_N_CTX, serving, wait_until

from llmaas_plugins.cli.main import main

pytest.importorskip("fastapi")

SHORT = {"temperature": 0.0, "max_tokens": 8}
PROMPT = "Tell me a long story."


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Start a server on a Unix socket, whose buffers a few hundred unread events fill."""
    folder = tmp_path_factory.mktemp("clients")
    settings = {"service": "client_timeout_s = 2", "n_ctx": LONG_N_CTX}
    with serving(folder, uds=folder / "run" / "service.sock", **settings) as server:
        yield server
        assert "Traceback" not in server.log()


@pytest.fixture
def clean(server, app):
    """Assert that each test leaves the next call unchanged, and nothing open."""
    said = app.new_context().call("Where is the station?", **SHORT)["text"]
    n_files = server.n_files()
    yield
    assert app.new_context().call("Where is the station?", **SHORT)["text"] == said
    wait_until(lambda: server.n_files() <= n_files)
    assert server.n_threads() < 16  # the plugin's six, and the used ones of the pool


def raw(server, path, body):
    """Open a connection on which a request was sent."""
    data = json.dumps(body).encode()
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(str(server.folder / "run" / "service.sock"))
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n"
    head += "Content-Type: application/json\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


def request_of(kind, context):
    """Return path and body of a request that keeps the engine busy for long."""
    call = f"/v1/llmaas{context._path}/call"
    prompt = f"{PROMPT} {context.id}"  # never evaluated before
    completion = {"prompt": prompt, **ENDLESS}
    chat = {"messages": [{"role": "user", "content": prompt}], **ENDLESS}
    return {
        "call": (call, completion),
        "stream": (call, completion | {"stream": True}),
        "completion": ("/v1/completions", completion),
        "completion stream": ("/v1/completions", completion | {"stream": True}),
        "chat": ("/v1/chat/completions", chat),
        "chat stream": ("/v1/chat/completions", chat | {"stream": True}),
    }[kind]


KINDS = ["call", "stream", "completion", "completion stream", "chat", "chat stream"]


@contextlib.contextmanager
def running(server, kind, context):
    """Keep a request of ``kind`` on the engine, past its prompt, inside the block."""
    before = server.kv()["evaluated_tokens"]
    with raw(server, *request_of(kind, context)) as connection:
        wait_until(lambda: server.kv()["evaluated_tokens"] > before)
        yield connection


@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize("kind", KINDS)
def test_a_client_that_leaves_while_its_call_runs(server, app, kind):
    context = app.new_context("Anna is here.")
    before = server.kv()["requests"]
    with running(server, kind, context):
        assert server.status()["queue"] == 1
    server.wait_until_idle()  # sooner than the request alone would have ended
    n_ended = server.kv()["requests"] - before
    assert n_ended == 1  # the next call may begin
    record = context.record()
    assert (record["n_calls"], len(record["messages"])) == (0, 1)


@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize("kind", KINDS)
def test_a_client_that_leaves_while_its_call_waits(server, app, kind):
    first, second = app.new_context(), app.new_context()
    before = server.kv()["requests"]
    with running(server, "stream", first):
        with raw(server, *request_of(kind, second)):
            wait_until(lambda: server.status()["queue"] == 2)
        wait_until(lambda: server.status()["queue"] == 1)
    server.wait_until_idle()
    assert server.kv()["requests"] == before + 1  # the second request never began


@pytest.mark.slow
@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize("kind", ["stream", "chat stream"])
def test_a_client_that_never_reads(server, app, kind):
    """The call ends ``client_timeout_s`` after the first unread byte."""
    with running(server, kind, app.new_context()):
        server.wait_until_idle()
        assert app.new_context().call("Hi", **SHORT)["text"]


@pytest.mark.slow
@pytest.mark.usefixtures("clean")
def test_a_client_that_reads_slowly_is_served_to_the_end(server, app):
    context = app.new_context()
    path, body = request_of("stream", context)
    with raw(server, path, body | {"max_tokens": 300}) as connection:
        received = b""
        while b"event: done" not in received:
            received += connection.recv(2000)
            threading.Event().wait(0.01)
    assert context.record()["n_calls"] == 1


CLIENT = """
import sys
from llmaas_plugins.server.client import LLMClient
context = LLMClient(sys.argv[1]).bind(sys.argv[2]).context(sys.argv[3])
for piece in context.stream(sys.argv[4], temperature=0.0, repeat_penalty=0.5, max_tokens=1900):
    print(flush=True)
"""


@pytest.mark.usefixtures("clean")
def test_killed_clients(server, app):
    contexts = [app.new_context() for _ in range(3)]
    with contextlib.ExitStack() as stack:
        clients = [
            stack.enter_context(
                fork_server.Process(
                    [sys.executable, "-c", CLIENT, server.address, app.name, context.id, PROMPT],
                    stdout=subprocess.PIPE,
                )
            )
            for context in contexts
        ]
        wait_until(lambda: server.status()["queue"] == 3)
        for client in clients:
            client.kill()
    server.wait_until_idle()
    assert [context.record()["n_calls"] for context in contexts] == [0, 0, 0]


def test_the_status_command(server, capsys):
    socket_ = server.folder / "run" / "service.sock"
    assert main(["status", "--uds", str(socket_)]) == 0
    assert capsys.readouterr().out.startswith(f"unix:{socket_}: 0 calls running or waiting\n")

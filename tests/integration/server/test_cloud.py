"""``llmaas serve`` with a cloud: unmodified clients, the engine's turn, consent, and privacy."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import threading
import time

import httpx
import pytest
import stub_cloud
from served import ENDLESS, LONG_N_CTX, serving, wait_until
from stub_cloud import MODEL, TEXT, StubCloud

from llmaas_plugins.chats.exports import load_conversations
from llmaas_plugins.knn_lm.build.inbox import waiting_files

openai = pytest.importorskip("openai")
pytest.importorskip("fastapi")

KEY = "sk-very-secret-4711"
ADMIN = "sesame-sesame-sesame"
KEYS = {app: f"{app}-0123456789abcdef" for app in ("mail", "diary", "notes")}
CONFIG = """
on_error = "raise"
[service]
state_dir = "state"
key_file = "keys.toml"
max_queue = 1
shutdown_grace_s = 30
[plugins.knn_lm]
store = "knn"
[cloud]
base_url = "{url}"
key_env = "STUB_KEY"
model = "large"
timeout_s = 20
[cloud.apps.mail]
keep = true
[cloud.apps.diary]
private = true
"""
ASKED = [{"role": "user", "content": "What is the capital of Norway?"}]
SECRET = [{"role": "user", "content": "My password is heliotrope."}]
SHORT = {"model": "mine", "temperature": 0.0, "max_tokens": 4}


@pytest.fixture(scope="module")
def stub():
    with StubCloud() as stub:
        yield stub


def started(folder, stub):
    """Return a server with keys that asks the stub."""
    path = folder / "keys.toml"
    path.touch(mode=0o600)
    path.write_text("".join(f'{app} = "{key}"\n' for app, key in KEYS.items()))
    config, environ = CONFIG.format(url=stub.url), {"STUB_KEY": KEY}
    options = {"key": ADMIN, "config": config, "environ": environ, "n_ctx": LONG_N_CTX}
    return serving(folder, "--api_key", ADMIN, **options)


@pytest.fixture(scope="module")
def server(tmp_path_factory, stub):
    with started(tmp_path_factory.mktemp("cloud"), stub) as server:
        yield server
        assert KEY not in server.log()
        assert "Traceback" not in server.log()


@pytest.fixture(autouse=True)
def a_cloud_that_answers(stub):
    stub.how = stub_cloud.answer


def client(server, app):
    return openai.OpenAI(base_url=f"{server.address}/v1", api_key=KEYS[app], max_retries=0)


def post(server, app, messages=ASKED, headers=None, **body):
    """Return the answer to a chat, and which model gave it."""
    headers = {"Authorization": f"Bearer {KEYS[app]}"} | (headers or {})
    body = {"messages": messages} | SHORT | body
    url = f"{server.address}/v1/chat/completions"
    response = httpx.post(url, json=body, headers=headers, timeout=60)
    assert response.status_code == 200
    return response, response.headers["x-llmaas-answered-by"]


def test_an_unmodified_client(server):
    with client(server, "notes") as notes:
        chat = notes.chat.completions
        done = chat.create(messages=ASKED, **SHORT)
        assert (done.choices[0].message.content, done.model) == (TEXT, "mine")
        assert done.usage.total_tokens == stub_cloud.USAGE["total_tokens"]
        streamed = list(chat.create(messages=ASKED, stream=True, **SHORT))
        assert "".join(c.choices[0].delta.content or "" for c in streamed if c.choices) == TEXT
        assert streamed[-2].choices[0].finish_reason == "stop"
        assert streamed[-1].usage == done.usage
        assert notes.completions.create(prompt="Oslo", **SHORT).choices[0].text == TEXT
        pieces = notes.completions.create(prompt="Oslo", stream=True, **SHORT)
        assert "".join(c.choices[0].text for c in pieces if c.choices) == TEXT


def test_the_local_model_answers_while_the_cloud_fails(server, stub):
    before = server.status()["cloud"]
    stub.how = stub_cloud.status(503)
    local, answered_by = post(server, "notes")
    assert answered_by == "local"
    assert json.loads(local.headers["x-llmaas-notes"])["cloud"] == {
        "answered_by": "local",
        "reason": "failed",
    }
    assert local.json()["usage"]["completion_tokens"] == 4
    after = server.status()["cloud"]
    assert after["failed"] == before["failed"] + 1
    streamed, answered_by = post(server, "notes", stream=True)
    assert answered_by == "local"
    assert b"[DONE]" in streamed.content
    counted = server.metrics(ADMIN)
    assert counted['llmaas_cloud_requests_total{outcome="failed"}'] >= after["failed"]
    stub.how = stub_cloud.answer
    time.sleep(server.status()["cloud"]["left_alone_s"])  # without the calls of a poll
    wait_until(lambda: post(server, "notes")[1] == "cloud")


def test_nothing_private_is_sent(server, stub):
    """Neither an app's requests, nor those that are marked, nor a client's key, nor contexts."""
    never = {"X-LLMaaS-Cloud": "never"}
    assert post(server, "diary", SECRET)[1] == "local"
    assert post(server, "mail", SECRET, never)[1] == "local"
    assert post(server, "mail", SECRET, never, stream=True)[1] == "local"
    with client(server, "mail") as mail:
        wrong = {"messages": SECRET, "extra_headers": {"X-LLMaaS-Cloud": "no"}} | SHORT
        with pytest.raises(openai.BadRequestError, match="expected never"):
            mail.chat.completions.create(**wrong)
    context = server.client.bind("mail").new_context(system=SECRET[0]["content"])
    context.call(SECRET[0]["content"], max_tokens=2)
    cookie = {"Cookie": f"id={KEYS['mail']}"}
    assert post(server, "mail", headers=cookie)[1] == "cloud"
    assert b"heliotrope" not in stub.raw
    assert all(key.encode() not in stub.raw for key in (ADMIN, *KEYS.values()))
    assert stub.received[-1].body == {"messages": ASKED} | SHORT | {"model": MODEL}
    assert KEY not in server.client.request("GET", "/status").__repr__()


def test_with_consent_the_answer_goes_to_the_inbox(server):
    asked = [{"role": "user", "content": "And which city is that?"}]

    def kept():
        files = waiting_files(server.folder / "knn")
        return [one for path in files for one in load_conversations(path)]

    post(server, "notes", asked)
    post(server, "mail", SECRET, {"X-LLMaaS-Cloud": "never"})
    post(server, "mail", ASKED + asked, stream=True)
    wait_until(lambda: any("city" in one.messages[-2].content for one in kept()))
    assert {(one.app, one.is_shared) for one in kept()} == {("mail", False)}
    said = [[message.content for message in one.messages] for one in kept()]
    assert said.count([ASKED[0]["content"], asked[0]["content"], TEXT]) == 1
    assert "heliotrope" not in repr(said)


def begun(stack, server):
    """Begin a long local answer, and return at once."""
    body = json.dumps({"messages": SECRET, "stream": True} | ENDLESS).encode()
    lines = [
        "POST /v1/chat/completions HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        "X-LLMaaS-Cloud: never",
        f"Authorization: Bearer {KEYS['diary']}",
        f"Content-Length: {len(body)}",
    ]
    connection = stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
    connection.sendall("\r\n".join([*lines, "", ""]).encode() + body)


def test_the_cloud_answers_while_the_engine_is_busy_and_the_queue_full(server):
    with contextlib.ExitStack() as stack:
        for n in (1, 2):
            begun(stack, server)
            wait_until(lambda n=n: server.status()["queue"] == n)
        assert post(server, "notes")[1] == "cloud"
        with client(server, "diary") as diary, pytest.raises(openai.RateLimitError):
            diary.chat.completions.create(messages=SECRET, **SHORT)
        assert server.status()["queue"] == 2
    server.wait_until_idle()


def test_a_client_that_leaves_ends_the_clouds_work(server, stub):
    stub.how, stub.left = stub_cloud.beginning(stub), threading.Event()
    with client(server, "notes") as notes:
        stream = notes.chat.completions.create(messages=ASKED, stream=True, **SHORT)
        assert next(iter(stream)).choices[0].delta.content
        stream.close()
    assert stub.left.wait(20)


def test_answers_of_the_cloud_may_finish_when_the_service_stops(tmp_path):
    go_on = threading.Event()

    def slowly(connection, request):
        go_on.wait(60)
        stub_cloud.answer(connection, request)

    with StubCloud() as stub, started(tmp_path, stub) as server:
        stub.how = slowly
        found = []
        thread = threading.Thread(target=lambda: found.append(post(server, "notes")))
        thread.start()
        wait_until(lambda: stub.received)
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: httpx.get(f"{server.address}/health").json()["status"] == "stopping")
        assert httpx.get(f"{server.address}/health").json()["running"] == 1
        go_on.set()
        thread.join()
        assert found[0][1] == "cloud"
        assert server.process.wait(60) == 0


def test_a_second_signal_ends_answers_of_the_cloud(tmp_path):
    with StubCloud() as stub, started(tmp_path, stub) as server:
        stub.how = lambda connection, _: stub.wait(connection)
        found = []

        def ask():
            headers = {"Authorization": f"Bearer {KEYS['notes']}"}
            body = {"messages": ASKED} | SHORT
            url = f"{server.address}/v1/chat/completions"
            found.append(httpx.post(url, json=body, headers=headers, timeout=60))

        thread = threading.Thread(target=ask)
        thread.start()
        wait_until(lambda: stub.received)
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: httpx.get(f"{server.address}/health").status_code == 503)
        server.process.send_signal(signal.SIGTERM)
        assert stub.left.wait(15)
        thread.join()
        assert found[0].status_code == 503
        assert server.process.wait(60) == 0


def test_a_failure_in_the_middle_of_a_stream_is_an_error_of_the_client(server, stub):
    """The cloud is left alone then, so this is the last test with this server."""
    stub.how = stub_cloud.beginning(stub, then=b"")
    with client(server, "notes") as notes:
        stream = notes.chat.completions.create(messages=ASKED, stream=True, **SHORT)
        with pytest.raises(openai.APIError, match="in the middle of its answer"):
            list(stream)
    assert server.status()["cloud"]["left_alone_s"] > 0

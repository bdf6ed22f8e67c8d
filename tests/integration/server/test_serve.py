"""``llmaas serve`` as a process: the OpenAI routes, our own, a Unix socket, and its end."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import subprocess
import threading

import httpx
import pytest
from served import ENGINE, drain, serving, wait_until

from llmaas_hooks import LimitError, LlmaasError
from llmaas_plugins.config import ServiceConfig
from llmaas_plugins.server.client import LLMClient
from llmaas_plugins.service.service import LLMService

openai = pytest.importorskip("openai")
pytest.importorskip("fastapi")

GREEDY = {"temperature": 0.0, "max_tokens": 10}
# set by llama_cpp.server's routes when a client does not set it
SERVERS_OWN = {"repeat_penalty": 1.1}
SETTINGS = {"service": "max_contexts_per_app = 3\nmax_queue = 1", "kv": 'ram_budget = "2 MiB"'}
TOO_LONG = "7" * 20_000
"""A text of as many tokens, more than even the longest tokens could make fit."""
SUBJECTS = ("Tell me about your dog.", "I want to fly to Rome.", "My phone is broken.")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    others = {"WEB_CONCURRENCY": "many", "FORWARDED_ALLOW_IPS": "*"}  # other programs' variables
    with serving(tmp_path_factory.mktemp("serve"), environ=others, **SETTINGS) as server:
        yield server


@pytest.fixture(scope="module")
def vanilla(reference_model):
    """Return stock llama-cpp-python's greedy reply to messages."""
    from llama_cpp import Llama

    options = ENGINE | {"verbose": False}
    with contextlib.closing(Llama(str(reference_model), **options)) as llama:

        def reply(messages, **sampling):
            done = llama.create_chat_completion(messages=messages, **GREEDY, **sampling)
            return done["choices"][0]["message"]["content"]

        yield reply


@pytest.fixture
def chat(server):
    """Return an unmodified OpenAI client."""
    with openai.OpenAI(base_url=f"{server.address}/v1", api_key="none") as client:
        yield client


# -- the OpenAI routes -----------------------------------------------------------------------------


def test_openai_chat(chat, vanilla):
    messages = [{"role": "user", "content": "Hello, how are you?"}]
    done = chat.chat.completions.create(model="any", messages=messages, **GREEDY)
    expected = vanilla(messages, **SERVERS_OWN)
    assert done.choices[0].message.content == expected
    chunks = chat.chat.completions.create(model="any", messages=messages, stream=True, **GREEDY)
    chunks = [chunk.choices[0] for chunk in chunks]
    assert "".join(choice.delta.content or "" for choice in chunks) == expected
    assert chunks[-1].finish_reason == done.choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": TOO_LONG}),
        ("/v1/completions", {"prompt": TOO_LONG, "stream": True}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": TOO_LONG}]}),
        ("/extras/tokenize", {"input": TOO_LONG}),
        ("/extras/tokenize/count", {"input": TOO_LONG}),
    ],
)
def test_a_text_that_cannot_fit_is_not_tokenized(server, path, body):
    """Its tokens are estimated, because nothing can interrupt llama.cpp while it counts them."""
    response = httpx.post(f"{server.address}{path}", json=body)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
    n_tokens = int(re.search(r"(?:requested |\()(\d+)", error["message"])[1])
    assert ENGINE["n_ctx"] < n_tokens < len(TOO_LONG) / 2
    assert "Traceback" not in server.log()


def test_openai_completions_and_models(chat):
    done = chat.completions.create(model="any", prompt="Once upon a time", **GREEDY)
    assert done.usage.completion_tokens == 10
    chunks = chat.completions.create(model="any", prompt="Once upon a time", stream=True, **GREEDY)
    assert "".join(chunk.choices[0].text for chunk in chunks) == done.choices[0].text
    assert [model.id.endswith(".gguf") for model in chat.models.list()] == [True]


def test_stateless_conversations_are_found_again(chat, server, vanilla):
    before = server.kv()
    conversations = [[{"role": "user", "content": subject}] for subject in SUBJECTS]
    n_prompt = []
    for turn in ("Why is that?", "I do not believe you.", None):
        for messages in conversations:
            done = chat.chat.completions.create(model="any", messages=messages, **GREEDY)
            n_prompt.append(done.usage.prompt_tokens)
            assert done.choices[0].message.content == vanilla(messages, **SERVERS_OWN)
            messages.append({"role": "assistant", "content": done.choices[0].message.content})
            messages.append({"role": "user", "content": turn})
    after = server.kv()
    assert after["requests"] - before["requests"] == 9
    assert after["restores"] - before["restores"] >= 6  # all but the first calls
    assert after["prompt_tokens"] - before["prompt_tokens"] == sum(n_prompt)
    # the previous calls' tokens
    assert after["reused_tokens"] - before["reused_tokens"] >= sum(n_prompt[:6])


@pytest.mark.slow
def test_a_waiting_app_does_not_cut_a_stream_short(chat):
    ends = []

    def stream(i):
        messages = [{"role": "user", "content": f"Tell me {i} stories."}]
        options = {"messages": messages, "temperature": 0.0, "max_tokens": 40, "stream": True}
        chunks = list(chat.chat.completions.create(model="any", **options))
        ends.append(chunks[-1].choices[0].finish_reason)

    threads = [threading.Thread(target=stream, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(ends) == 3
    assert set(ends) <= {"length", "stop"}


# -- our own routes --------------------------------------------------------------------------------


def test_contexts_over_http(app, server, vanilla):
    before = server.kv()["restores"]
    contexts = [app.new_context(f"{name} is here.") for name in ("Anna", "Bert", "Cleo")]
    for turn in (None, "Why is that?"):
        for context, subject in zip(contexts, SUBJECTS, strict=True):
            messages = context.record()["messages"]
            reply = context.call(turn or subject, **GREEDY)
            expected = vanilla([*messages, {"role": "user", "content": turn or subject}])
            assert reply["text"] == expected.strip()
            assert reply["finish_reason"] in ("length", "stop")
            record = context.record()
            assert record["messages"][-1] == {"role": "assistant", "content": reply["text"]}
            assert record["n_tokens"] == reply["n_tokens"]
    assert [context.id for context in app.contexts()] == [c.id for c in reversed(contexts)]
    assert server.kv()["restores"] - before == 3


def test_streaming(app):
    expected = app.new_context().call("Hello", **GREEDY)
    context = app.new_context()
    pieces, reply = drain(context.stream("Hello", **GREEDY))
    assert len(pieces) > 3
    assert "".join(pieces).strip() == reply["text"] == expected["text"]
    assert {**reply, "first_token_s": 0, "total_s": 0} == {
        **expected, "first_token_s": 0, "total_s": 0
    }  # fmt: skip
    assert context.record()["n_calls"] == 1


def test_deletion(app, server):
    context = app.new_context("Somebody is here.")
    context.call(SUBJECTS[0], **GREEDY)
    before = server.kv()
    assert context.delete() > 0
    after = server.kv()
    assert before["contexts"] - after["contexts"] == 1
    assert after["chunks"] < before["chunks"]
    assert app.contexts() == []
    for use in (context.record, context.delete, lambda: context.call("Hi")):
        with pytest.raises(LookupError, match=rf"no context '{context.id}' \(HTTP 404\)"):
            use()
    with pytest.raises(LookupError, match=context.id):
        next(context.stream("Hi"))


def test_apps_do_not_see_each_other(app, server):
    context = app.new_context("secret")
    other = server.client.bind("somebody else")
    assert other.contexts() == []
    with pytest.raises(LookupError, match="404"):
        other.context(context.id).record()


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"max_tokens": 0}, "greater than or equal to 1"),
        ({"temprature": 1.0}, "temprature"),
        ({"top_p": "much"}, "top_p"),
        ({"level": 0.5}, "the plugin elastic is not on"),
    ],
)
def test_what_the_service_cannot_understand(app, sampling, message):
    context = app.new_context()
    with pytest.raises(LlmaasError, match=rf"^[^\[{{]*{message}[^\]}}]*\(HTTP 422\)$"):
        context.call("Hi", **sampling)
    with pytest.raises(LlmaasError, match=r"\(HTTP 422\)"):
        next(context.stream("Hi", **sampling))
    assert context.record()["messages"] == []


@pytest.mark.parametrize("name", ["a\nb", "a" * 129, "\x7f"])
def test_bad_app_names(server, name):
    with pytest.raises(LlmaasError, match=r"1 to 128 printable.*\(HTTP 422\)"):
        server.client.bind(name).new_context()


def test_clients_cannot_choose_the_address_that_is_logged(server):
    forwarded = {"X-Forwarded-For": "192.0.2.7"}
    assert httpx.get(f"{server.address}/v1/models", headers=forwarded).status_code == 200
    wait_until(lambda: "GET /v1/models" in server.log())
    assert "192.0.2.7" not in server.log()


def test_app_names_of_all_kinds(server):
    for name in ("com.example.mail", "Grüße 世界?#&%", "..", " "):
        app = server.client.bind(name)
        context = app.new_context()
        assert [found.id for found in app.contexts()] == [context.id]
        context.delete()


def test_too_many_contexts(app):
    for _ in range(3):
        app.new_context()
    with pytest.raises(LimitError, match=r"the limit is 3.*max_contexts_per_app.*\(HTTP 429\)"):
        app.new_context()


@pytest.mark.parametrize("how", ["call", "stream"])
def test_a_prompt_that_does_not_fit(app, how):
    context = app.new_context()
    with pytest.raises(LimitError, match=rf"{context.id} .*not fit into 512.*\(HTTP 429\)"):
        context.call("word " * 600) if how == "call" else next(context.stream("word " * 600))
    assert context.record()["messages"] == []
    assert context.call("Hi", **GREEDY)["text"]


def test_too_many_calls(app, server):
    """The queue holds one call: of several calls at once, some are refused, others answered."""
    contexts = [app.new_context() for _ in range(3)] * 2
    answers, refusals = [], []

    def call(context):
        try:
            answers.append(context.call("Tell me a story.", temperature=0.0, max_tokens=60))
        except LimitError as error:
            refusals.append(str(error))

    for _ in range(5):
        threads = [threading.Thread(target=call, args=(context,)) for context in contexts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        if refusals:
            break
    assert "the limit is 1. Try again later. (HTTP 429)" in refusals[0]
    assert answers
    assert sum(context.record()["n_calls"] for context in contexts[:3]) == len(answers)
    assert server.client.status()["queue"] == 0


@pytest.mark.parametrize("n_pieces", [1, 2, 7])
def test_a_cancelled_stream_frees_the_engine(app, n_pieces):
    context, other = app.new_context(), app.new_context()
    for _ in range(3):
        stream = context.stream("Tell me a long story.", temperature=0.0, max_tokens=400)
        for _ in range(n_pieces):
            next(stream)
        stream.close()
        assert other.call("Hi", **GREEDY)["text"]
    assert context.record()["messages"] == []


def test_a_client_that_leaves_at_once(app, server):
    context = app.new_context()
    body = json.dumps({"prompt": "Tell me a story.", "stream": True, "max_tokens": 400}).encode()
    for answer_bytes in (0, 0, 20):
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(
                b"POST /v1/llmaas%s/call HTTP/1.1\r\nHost: localhost\r\n" % context._path.encode()
                + b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
                + body
            )
            if answer_bytes:
                connection.recv(answer_bytes)
    server.wait_until_idle()
    assert context.record()["messages"] == []
    assert context.call("Hi", **GREEDY)["text"]


def test_a_disconnected_openai_stream_frees_the_engine(app, chat):
    messages = [{"role": "user", "content": "Tell me a long story."}]
    options = {"model": "any", "messages": messages, "max_tokens": 400, "temperature": 0.0}
    with chat.chat.completions.create(stream=True, **options) as stream:
        next(iter(stream))
    assert app.new_context().call("Hi", **GREEDY)["text"]


def test_status(server):
    status = server.client.status()
    assert status["queue"] == 0
    assert status["plugins"]["kv_chunks"]["codec"] == "lossless"
    assert status["plugins"]["kv_chunks"]["left_alone"] == []
    assert "Llama.generate" in status["patched"]


# -- a Unix socket, a key, and the end -------------------------------------------------------------


@pytest.fixture
def private(tmp_path):
    """Start a server of the test's own on a Unix socket, with an API key."""
    uds = tmp_path / "run" / "llmaas" / "service.sock"
    with serving(tmp_path, "--api_key", "sesame", uds=uds, key="sesame", **SETTINGS) as server:
        yield server


def test_unix_socket_and_key(private):
    path = private.folder / "run" / "llmaas" / "service.sock"
    assert path.parent.stat().st_mode & 0o777 == 0o700
    context = private.client.bind("mail").new_context("Anna is here.")
    assert context.call("Hi", **GREEDY)["text"]
    assert drain(context.stream("Hello", **GREEDY))[1]["text"]
    for key in (None, "open", "sesame2"):
        stranger = LLMClient(private.address, api_key=key)
        for use in (
            stranger.status,
            stranger.bind("mail").new_context,
            stranger.bind("mail").contexts,
            stranger.bind("mail").context(context.id).record,
            stranger.bind("mail").context(context.id).delete,
            lambda s=stranger: s.bind("mail").context(context.id).call("Hi"),
            lambda s=stranger: next(s.bind("mail").context(context.id).stream("Hi")),
        ):
            expected = "Invalid API key" if key else "No API key was sent; .*"
            with pytest.raises(LlmaasError, match=rf"^{expected} \(HTTP 401\)$"):
                use()
    assert context.record()["n_calls"] == 2
    assert context.delete() > 0


@pytest.mark.slow
def test_sigterm_ends_it_cleanly_and_contexts_are_there_again(private):
    context = private.client.bind("mail").new_context()
    text = context.call("Tell me about your dog.", **GREEDY)["text"]
    assert private.stop() == 0
    assert "Traceback" not in private.log()
    files = {file.name for file in (private.folder / "state").iterdir()}
    assert files == {"contexts.sqlite", "reserve"}
    assert not (private.folder / "kv" / "index.sqlite-wal").exists()
    assert not (private.folder / "run" / "llmaas" / "service.sock").exists()
    # one that is not forked: its imports, its start and its end are those of a user's
    options = SETTINGS | {"uds": private.address.removeprefix("unix:"), "start": subprocess.Popen}
    with serving(private.folder, **options) as again:
        (context,) = again.client.bind("mail").contexts()
        assert context.record()["messages"][-1]["content"] == text
        context.call("Why is that?", **GREEDY)
        found = again.kv()
        assert found["restores"] == 1
        assert found["disk_hits"] > 0
        assert again.stop(signal.SIGINT) == 0
        assert "Traceback" not in again.log()


def test_a_deletion_that_was_cut_off_is_finished_without_a_warning(tmp_path):
    with LLMService(lambda: None, ServiceConfig(state_dir=tmp_path / "state")) as service:
        context = service.bind("mail").new_context("secret")
        service._log.expect_kv(context.id)
        service._log.delete(context.id, "mail")  # killed after that
    with serving(tmp_path, **SETTINGS) as server:
        assert (tmp_path / "kv" / "lock").exists()  # the service opened its store to finish it
        assert "is in use by" not in server.log()


def test_a_port_that_is_taken_and_a_state_folder_in_use(refused, server):
    message = refused("--toy", "--port", str(server.port))
    assert f"port {server.port}: Address already in use" in message
    same = f'[service]\nstate_dir = "{server.folder}/state"\n'
    (server.folder / "same.toml").write_text(same)
    message = refused("--toy", "--port", "0", "--config", str(server.folder / "same.toml"))
    assert message.startswith(f"llmaas: error: another service uses {server.folder}/state.")

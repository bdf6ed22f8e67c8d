"""``llama_cpp.server`` under ``llmaas run``, and ``llmaas serve``, each beside the plain server.

The ``openai`` package and lm-evaluation-harness must get the same results from all of them.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import re
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import fork_server
import pytest
from soak import scale

openai = pytest.importorskip("openai")
pytest.importorskip("fastapi")

pytestmark = pytest.mark.slow  # three servers, two of them in interpreters of their own

# Evaluate one token at a time: replies must not depend on which tokens were restored.
OPTIONS = [
    "--n_ctx", "1024", "--n_ubatch", "1", "--n_threads", "1", "--n_threads_batch", "1",
    "--flash_attn", "True", "--logits_all", "True", "--interrupt_requests", "False",
    "--chat_format", "chatml-function-calling",
]  # fmt: skip
SERVER = ["llama_cpp.server"]
LLMAAS = [sys.executable, "-m", "llmaas_plugins.cli.main"]
COMMANDS = {
    "plain": [sys.executable, "-m", *SERVER],
    "run": [*LLMAAS, "run", "--config", "llmaas.toml", "-m", *SERVER],
    "serve": [*LLMAAS, "-v", "serve", "--config", "llmaas.toml"],
}
ROWS = {"run": "openai, `llmaas run -m llama_cpp.server`", "serve": "openai, `llmaas serve`"}
CONFIG = """
on_error = "raise"
[service]
state_dir = "state"
[plugins.kv_chunks]
codec = "lossless"
ram_budget = "4 MiB"
store = "kv"
"""
GREEDY = {"model": "any", "temperature": 0.0}
TURNS = ("Why is that?", "I do not believe you.")
FLIGHT = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "seat": {"enum": ["aisle", "window"]}},
    "required": ["city", "seat"],
}
TOOL = {"type": "function", "function": {"name": "book", "parameters": FLIGHT}}


def on_both(*columns, says="yes"):
    """Run the test against both of our servers, for these cells of the table."""

    def marks(row):
        cells = [*((column, says) for column in columns), ("same as vanilla", "yes")]
        return [pytest.mark.compat("clients", row, *cell) for cell in reversed(cells)]

    params = [pytest.param(name, marks=marks(row)) for name, row in ROWS.items()]
    return pytest.mark.parametrize("ours", params, indirect=True)


@pytest.fixture(scope="module")
def servers(tmp_path_factory, reference_model):
    """Yield the three servers by name; started side by side, killed at the end."""
    with contextlib.ExitStack() as stack:
        started = {
            name: stack.enter_context(
                running(
                    [*command, "--model", str(reference_model)],
                    tmp_path_factory.mktemp(name),
                    fork_server.Process if name == "serve" else subprocess.Popen,
                )
            )
            for name, command in COMMANDS.items()
        }
        for server in started.values():
            wait_until_up(server)
        yield started


@contextlib.contextmanager
def running(command, folder, start):
    (folder / "llmaas.toml").write_text(CONFIG)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    environ = {k: v for k, v in os.environ.items() if not k.startswith("LLMAAS")}
    log, address = folder / "log", f"http://127.0.0.1:{port}"
    with (
        log.open("wb") as output,
        start(
            [*command, "--port", str(port), *OPTIONS],
            cwd=folder,
            env=environ,
            stdout=output,
            stderr=output,
        ) as process,
        openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client,
    ):
        try:
            yield SimpleNamespace(
                process=process, client=client, port=port, address=address, log=log
            )
        finally:
            process.kill()


def wait_until_up(server):
    deadline = time.monotonic() + 60
    while True:
        assert server.process.poll() is None, server.log.read_text()
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", server.port)):
            return
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture(scope="module")
def plain(servers):
    """Return an app's results from the plain server, computed once for both of ours."""
    known = {}

    def plain(app):
        if app.__qualname__ not in known:
            known[app.__qualname__] = app(servers["plain"])
        return known[app.__qualname__]

    return plain


@pytest.fixture
def ours(servers, request):
    server = servers[request.param]
    yield server
    log = server.log.read_text()
    assert "Traceback" not in log
    assert "ERROR" not in log


def hits(server):
    """Return the tokens that were in the cells when a request began, as ``Llama`` logs them."""
    log = server.log.read_text()
    found = re.findall(r"^Llama\.generate: (\d+) prefix-match hit", log, re.MULTILINE)
    return [int(n) for n in found]


def said(client, messages, **options):
    done = client.chat.completions.create(messages=messages, **GREEDY | options)
    return done.choices[0].message


def conversation(subject):
    return [{"role": "user", "content": subject}]


def converse(client, subjects):
    """Hold several conversations, one call of each in turn; return replies and prompt sizes."""
    conversations, found = [conversation(subject) for subject in subjects], []
    for turn in (*TURNS, None):
        for messages in conversations:
            done = client.chat.completions.create(messages=messages, max_tokens=8, **GREEDY)
            found.append((done.choices[0].message.content, done.usage.prompt_tokens))
            messages.append({"role": "assistant", "content": done.choices[0].message.content})
            messages.append({"role": "user", "content": turn})
    return found


@on_both("chat", "contexts restored")
def test_conversations_in_turn(plain, ours, subjects):
    def app(server):
        return converse(server.client, subjects)

    expected = plain(app)
    n_before = len(hits(ours))
    assert app(ours) == expected
    n_prompt = [n for _, n in expected[:4]]  # prompts of the calls that are continued
    found = hits(ours)[n_before:][-4:]
    assert all(hit >= n for hit, n in zip(found, n_prompt, strict=True))


def completions(client, texts, **options):
    return [
        client.completions.create(prompt=text, max_tokens=8, **GREEDY, **options).choices[0]
        for text in texts
    ]


@on_both("completion", "logprobs")
def test_logprobs(plain, ours, subjects):
    def app(server):
        client = server.client
        chats = [
            client.chat.completions.create(
                messages=conversation(s), max_tokens=8, logprobs=True, top_logprobs=3, **GREEDY
            ).choices[0]
            for s in subjects * 2
        ]
        return [c.logprobs for c in (*completions(client, subjects * 2, logprobs=3), *chats)]

    expected = plain(app)
    assert app(ours) == expected
    assert None not in expected


def streamed(client, messages, n_chunks=None, **options):
    """Return the first chunks of a reply, then leave as a client."""
    options = {"messages": messages, "max_tokens": 12, "stream": True} | GREEDY | options
    with client.chat.completions.create(**options) as stream:
        return [chunk.choices[0].model_dump() for chunk in itertools.islice(stream, n_chunks)]


@on_both("streaming")
def test_streams(plain, ours, subjects):
    def app(server):
        client = server.client
        return [streamed(client, conversation(subject)) for subject in subjects * 2]

    expected = plain(app)
    assert min(len(chunks) for chunks in expected) > 5
    assert app(ours) == expected


@on_both("cancel")
def test_streams_left_early(plain, ours, subjects):
    def app(server):
        client = server.client
        found = []
        for n_chunks in (1, 4, 9):
            for subject in subjects:
                messages = conversation(subject)
                chunks = streamed(client, messages, n_chunks, max_tokens=600)
                text = "".join(chunk["delta"].get("content") or "" for chunk in chunks)
                messages += [{"role": "assistant", "content": text}, *conversation("Go on.")]
                found += [chunks, said(client, messages, max_tokens=8).content]
        return found

    expected = plain(app)
    before = n_left(ours)
    # a fast machine completes most replies before it notices that the client left
    for _ in range(6):
        assert app(ours) == expected
        if n_left(ours) > before:
            return
    pytest.fail("every reply was complete before its client had left")


def n_left(server):
    """Return how many clients left before their reply was complete, as the server logs it."""
    return server.log.read_text().count("Disconnected from client")


@on_both("tools")
def test_tools(plain, ours, subjects):
    choice = {"type": "function", "function": {"name": "book"}}
    options = {"tools": [TOOL], "tool_choice": choice, "max_tokens": 60}

    def app(server):
        client = server.client
        messages = [said(client, conversation(s), **options) for s in subjects * 2]
        calls = [call.function for message in messages for call in message.tool_calls]
        return [(call.name, call.arguments) for call in calls]

    expected = plain(app)
    assert {name for name, _ in expected} == {"book"}
    assert all('"seat"' in arguments for _, arguments in expected)
    assert app(ours) == expected


@on_both("grammar / JSON")
def test_json(plain, ours, subjects):
    options = {"response_format": {"type": "json_object", "schema": FLIGHT}, "max_tokens": 60}

    def app(server):
        client = server.client
        return [said(client, conversation(s), **options).content for s in subjects * 2]

    expected = plain(app)
    assert all('"seat"' in text for text in expected)
    assert app(ours) == expected


@on_both("several at once")
def test_several_clients_at_once(plain, ours, subjects):
    users = (*subjects, "My name is Cleo and I have been ill for a week. My phone is broken, too.")

    def app(server):
        with ThreadPoolExecutor(len(users)) as pool:
            return list(pool.map(lambda subject: converse(server.client, [subject]), users))

    expected = plain(app)
    assert app(ours) == expected
    assert len({str(replies) for replies in expected}) == len(users)


@pytest.mark.soak
@pytest.mark.parametrize("ours", ["run", "serve"], indirect=True)
def test_users_that_leave_at_any_moment(plain, ours, subjects):
    prompts = [f"{name}. {subject}" for name in ("Dora", "Emil", "Fay") for subject in subjects]

    def app(server):
        return {p: said(server.client, conversation(p), max_tokens=8).content for p in prompts}

    expected = plain(app)

    def user(seed):
        rng = random.Random(seed)
        for _ in range(scale(2, 300)):
            prompt, n_chunks = rng.choice(prompts), rng.randint(0, 12)
            streamed(ours.client, conversation(prompt), n_chunks, max_tokens=100)
            prompt = rng.choice(prompts)
            reply = said(ours.client, conversation(prompt), max_tokens=8)
            assert reply.content == expected[prompt]

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(user, range(4)))


# -- lm-evaluation-harness -------------------------------------------------------------------------


@pytest.mark.parametrize("ours", ["run", "serve"], indirect=True)
@pytest.mark.compat("clients", "lm-evaluation-harness `gguf`", "completion", "yes")
@pytest.mark.compat("clients", "lm-evaluation-harness `gguf`", "logprobs", "yes")
@pytest.mark.compat("clients", "lm-evaluation-harness `gguf`", "same as vanilla", "yes")
def test_lm_eval(plain, ours, subjects):
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance
    from lm_eval.models.gguf import GGUFLM

    def app(server):
        model = GGUFLM(server.address)
        choices = [(s, e) for s in subjects for e in (" I do not know.", " Yes, it is.")]
        likelihoods = model.loglikelihood(instances("loglikelihood", choices * 2))
        until = [(s, {"until": ["\n", "."]}) for s in subjects * 2]
        return likelihoods, model.generate_until(instances("generate_until", until))

    def instances(kind, arguments):
        return [Instance(kind, {}, args, i) for i, args in enumerate(arguments)]

    likelihoods, texts = plain(app)
    assert len(set(likelihoods)) == 4
    assert all(texts)
    assert app(ours) == (likelihoods, texts)

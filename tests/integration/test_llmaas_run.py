"""An unmodified ``llama_cpp.server`` under ``llmaas run``, used by an unmodified ``openai`` client.

Its replies are compared with those of plain ``python -m llama_cpp.server`` to the same requests in
the same order. When a conversation comes back, plain llama.cpp evaluates it in other batches than
an engine that restored its cells. Floats are then added in another order, and another token may
win. Both servers therefore evaluate one token at a time here, so cells are equal to the last bit
and replies must be equal.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time

import fork_server
import pytest

openai = pytest.importorskip("openai")
pytest.importorskip("fastapi")

OPTIONS = [
    "--n_ctx", "512", "--n_ubatch", "1", "--n_threads", "1", "--n_threads_batch", "1",
    "--flash_attn", "True", "--logits_all", "False",
]  # fmt: skip
PLAIN = [sys.executable, "-m", "llama_cpp.server"]
LLMAAS = [sys.executable, "-m", "llmaas_plugins.cli.main"]
CONFIG = """
on_error = "raise"
[plugins.kv_chunks]
codec = "lossless"
ram_budget = "2 MiB"
store = "kv"
"""
SUBJECTS = ("Tell me about your dog.", "I want to fly to Rome.", "My phone is broken.")
TURNS = ("Why is that?", "I do not believe you.")


@pytest.fixture
def serving(tmp_path, reference_model):
    """Run a server command; yield a client, the process, and the engine's reused tokens."""

    @contextlib.contextmanager
    def serving(command, start=subprocess.Popen):
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        environ = dict(os.environ)
        log = tmp_path / "log"
        with (
            log.open("wb") as output,
            start(
                [*command, "--model", str(reference_model), "--port", str(port), *OPTIONS],
                cwd=tmp_path,
                env=environ,
                stdout=output,
                stderr=output,
            ) as process,
            openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none") as client,
        ):
            try:
                deadline = time.monotonic() + 60
                while not is_up(port):
                    assert process.poll() is None, log.read_text()
                    assert time.monotonic() < deadline
                    time.sleep(0.02)
                yield client, process, lambda: prefix_hits(log.read_text())
            finally:
                process.kill()

    return serving


def is_up(port):
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


def prefix_hits(log):
    """Return the reused tokens of each prompt, as Llama itself logs them."""
    return [
        int(n) for n in re.findall(r"^Llama\.generate: (\d+) prefix-match hit", log, re.MULTILINE)
    ]


def converse(client, conversations, turns):
    """Call every conversation in turn, so that each call is a switch.

    Return replies and prompt sizes.
    """
    found = []
    for turn in turns:
        for messages in conversations:
            messages.append({"role": "user", "content": turn or SUBJECTS[len(found)]})
            done = client.chat.completions.create(
                model="any", messages=messages, temperature=0.0, max_tokens=12
            )
            reply = done.choices[0]
            messages.append({"role": "assistant", "content": reply.message.content})
            found.append((reply.message.content, reply.finish_reason, done.usage.prompt_tokens))
    return found


def streamed(client, messages):
    chunks = client.chat.completions.create(
        model="any", messages=messages, temperature=0.0, max_tokens=12, stream=True
    )
    return [chunk.choices[0].model_dump() for chunk in chunks]


def stop(process):
    process.send_signal(signal.SIGINT)
    return process.wait(60)


@pytest.mark.slow
def test_conversations_switched_underneath(serving, tmp_path):
    (tmp_path / "llmaas.toml").write_text(CONFIG)
    suite = [*LLMAAS, "run", "--config", "llmaas.toml", *PLAIN[1:]]
    last = [{"role": "user", "content": SUBJECTS[0]}]

    with serving(PLAIN) as (client, process, reused):
        plain = [[] for _ in SUBJECTS]
        expected = converse(client, plain, (None, *TURNS))
        expected_stream = streamed(client, last)
        plain_hits = reused()
        exit_code = stop(process)

    conversations = [[] for _ in SUBJECTS]
    with serving(suite) as (client, process, reused):
        found = converse(client, conversations, (None, TURNS[0]))
        hits = reused()[-3:]
        assert stop(process) == exit_code
    with serving(suite) as (client, process, reused):  # a restart in between makes no difference
        found += converse(client, conversations, TURNS[1:])
        hits += reused()[-3:]
        assert streamed(client, last) == expected_stream
        assert stop(process) == exit_code

    assert found == expected
    assert len({reply for reply, *_ in expected}) > 5  # a mix-up would show
    n_prompt = [n for *_, n in expected]
    assert all(
        hit >= n for hit, n in zip(hits, n_prompt[:6], strict=True)
    )  # all tokens of the previous call
    assert max(plain_hits) < min(n_prompt)  # plain llama.cpp had at most the beginning


@pytest.mark.slow
def test_terminated_like_plain_and_usable_again(serving, tmp_path):
    (tmp_path / "llmaas.toml").write_text(CONFIG)
    suite = [*LLMAAS, "run", "--config", "llmaas.toml", *PLAIN[1:]]
    for command in (suite, suite):
        with serving(command, fork_server.Process) as (client, process, _):
            converse(client, [[]], (None,))
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == -signal.SIGTERM
    assert "cannot use" not in (tmp_path / "log").read_text()

"""A storm on one ``llmaas serve``: calls, streams, cancels, deletions, garbage and killed clients.

Whatever the other apps do, an app's replies are those of stock llama.cpp if cells are kept bit
for bit. Every acknowledged reply is in its context's record. Afterwards the server is as before.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import socket
import subprocess
import sys
import threading
import time

import fork_server
import pytest
from conversations import APPS, GREEDY, PROMPTS, SUPPORT, follows, system_prompt, vanilla
from served import ENDLESS, serving, wait_until
from soak import scale

from llmaas_hooks import LimitError

pytest.importorskip("openai")
pytest.importorskip("fastapi")

SECONDS = scale(4, 150)
MIB = 1 << 20
MOST_WAITING = 4
SERVICE = f"max_queue = {MOST_WAITING}\nmax_body_bytes = 65536\nclient_timeout_s = 5"
DISK = 'disk_budget = "1200 KiB"\n'
WRITES = MIB  # per day
KVS = {
    "lossless": DISK + 'ram_budget = "1 MiB"\nshare_across_apps = true',
    "tolerance": DISK + f'ram_budget = "2 MiB"\nparked_tokens = 256\nwrite_budget = {WRITES}',
}
GARBAGE = (
    ("/v1/chat/completions", b"garbage"),
    ("/v1/chat/completions", b'{"messages": 5}'),
    ("/v1/chat/completions", b"[" * 10_000),
    ("/v1/completions", b'{"prompt": "a", "grammar": "x"}'),
    ("/v1/completions", b'{"prompt": "' + b"x" * 70_000 + b'"}'),
    ("/extras/detokenize", b'{"tokens": [-1]}'),
    ("/v1/llmaas/apps/x/contexts/none/call", b'{"prompt": "Hi"}'),
    ("/v1/llmaas/apps/x/contexts", b'{"system": 5}'),
)

# The same conversations over the OpenAI routes, in a process of its own. It runs until its input
# ends and one answer came: a slow machine may turn it away during the whole storm.
OPENAI_CLIENT = """
import json, select, sys
import openai
job = json.loads(sys.argv[1])
client = openai.OpenAI(base_url=job["url"], api_key="none", max_retries=1000)
print("ready", flush=True)
n_calls = 0
while not n_calls or not select.select([sys.stdin], [], [], 0)[0]:
    for app, said in job["expected"].items():
        for before, after in zip(said, said[1:]):
            stream = n_calls % 2 == 1
            done = client.chat.completions.create(
                model="any", messages=after[:-1], stream=stream, **job["sampling"],
                extra_body={"repeat_penalty": 1.0},
            )
            if stream:
                text = "".join(chunk.choices[0].delta.content or "" for chunk in done)
            else:
                text = done.choices[0].message.content
            assert job["is_lossy"] or text.strip() == after[-1]["content"], (app, text)
            n_calls += 1
            if select.select([sys.stdin], [], [], 0)[0]:
                break
print(n_calls)
"""
DYING_CLIENT = """
import sys, time
from llmaas_hooks import LimitError
from llmaas_plugins.server.client import LLMClient
context = LLMClient(sys.argv[1]).bind("dying").new_context()
while True:
    try:
        for piece in context.stream("Go on.", temperature=0.0, repeat_penalty=0.5, max_tokens=400):
            print(flush=True)
    except LimitError:
        time.sleep(0.02)
"""


@pytest.fixture(scope="module")
def expected(reference_model):
    """Return each app's messages after each call, from stock llama.cpp."""
    return {app: [messages for messages, _ in vanilla(reference_model, app)] for app in APPS}


class Storm:
    """Threads that repeat their action until the storm is over."""

    def __init__(self, server):
        self.server = server
        self.problems = []
        self.counts = {}
        self._end = threading.Event()
        self._threads = []

    def blow(self, name, action, *args):
        """Repeat ``action``, which may return how often it succeeded."""

        def work():
            while not self._end.is_set():
                try:
                    done = action(*args)
                    self.counts[name] = self.counts.get(name, 0) + (1 if done is None else done)
                except LimitError:
                    time.sleep(0.02)
                except Exception as error:
                    self.problems.append(f"{name}: {error!r}")
                    return

        self._threads.append(threading.Thread(target=work, name=name))
        self._threads[-1].start()

    def end(self):
        self._end.set()
        for thread in self._threads:
            thread.join(120)
            assert not thread.is_alive(), thread.name


class Talk:
    """One app's conversation, held to its end and begun anew; the record must hold each reply.

    Args:
        server: Server to talk to.
        name: Name of the app.
        expected: The app's messages after each call; None if they cannot be known.
        streams: Whether replies are streamed.
    """

    def __init__(self, server, name, expected, *, streams):
        self.app = server.client.bind(name)
        self.name = name.partition(" ")[0]
        self.expected = expected
        self.streams = streams
        self.context, self.messages = None, None

    def step(self):
        if self.context is None:
            self.context = self.app.new_context(system_prompt(self.name))
            self.messages = [{"role": "system", "content": system_prompt(self.name)}]
        if follows(self.messages, None, self.name):
            self.context.delete()
            self.context = None
            return 0
        prompt = PROMPTS[len(self.messages) // 2]
        if self.streams:
            text = "".join(self.context.stream(prompt, **GREEDY)).strip()
        else:
            text = self.context.call(prompt, **GREEDY)["text"]
        self.messages += [
            {"role": "user", "content": prompt},
            {"role": "assistant", "content": text},
        ]
        self.check()
        return 1

    def check(self):
        if self.context is not None:
            record = self.context.record()
            assert record["n_calls"] == len(self.messages) // 2
            assert record["messages"] == self.messages
            assert self.expected is None or self.messages in self.expected


def cancel(app, rng):
    """Begin a long reply and leave; the context is unchanged unless the reply was complete."""
    context = (app.contexts() or [app.new_context("Cleo is here.")])[0]
    stream = context.stream("Go on.", **ENDLESS | {"max_tokens": 400})
    for _ in range(rng.randint(1, 20)):
        next(stream)
    stream.close()
    record = context.record()
    assert len(record["messages"]) == 1 + 2 * record["n_calls"]
    if record["n_calls"]:
        context.delete()


def send_garbage(server, rng):
    path, body = rng.choice(GARBAGE)
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    with contextlib.closing(connection):
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        assert 400 <= response.status < 500, (response.status, path, response.read())
        assert json.loads(response.read())["detail"]


def send_half(server, rng):
    request = (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    )
    request += b'Content-Length: 40\r\n\r\n{"prompt": "Once", "max_tokens": 300}   '
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(request[: rng.randint(1, len(request))])
        time.sleep(rng.uniform(0, 0.05))


def kill_client(server, rng):
    command = [sys.executable, "-c", DYING_CLIENT, server.address]
    with fork_server.Process(command, stdout=subprocess.PIPE) as client:
        for _ in range(rng.randint(1, 10)):
            client.stdout.readline()
        client.kill()
    for context in server.client.bind("dying").contexts():
        assert context.record()["n_calls"] == 0
        while not deleted(context):
            time.sleep(0.02)


def deleted(context):
    """Return whether the context could be deleted now; the queue may be full."""
    with contextlib.suppress(LimitError):
        context.delete()
        return True
    return False


@contextlib.contextmanager
def openai_client(server, expected, *, is_lossy):
    job = {"url": f"{server.address}/v1", "expected": expected, "sampling": GREEDY}
    job["is_lossy"] = is_lossy
    with subprocess.Popen(
        [sys.executable, "-c", OPENAI_CLIENT, json.dumps(job)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": SUPPORT},
    ) as client:
        assert client.stdout.readline() == b"ready\n"
        results = []
        yield results
        results.append(int(client.communicate(timeout=120)[0] or 0))
        assert client.returncode == 0


def watch(server, seconds):
    """Return the longest queue that was seen."""
    longest, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        longest = max(longest, server.status()["queue"])
        time.sleep(0.01)
    return longest


@pytest.mark.soak
@pytest.mark.parametrize("codec", KVS)
def test_a_storm(tmp_path, expected, codec):
    is_lossy = codec != "lossless"
    options = {"codec": codec, "kv": KVS[codec], "start": subprocess.Popen}  # memory is measured
    with serving(tmp_path, service=SERVICE, **options) as server:
        storm = Storm(server)
        talks = [
            Talk(
                server,
                name,
                None if is_lossy else expected[name.partition(" ")[0]],
                streams=i % 2 == 1,
            )
            for i, name in enumerate([*APPS, *(f"{app} again" for app in APPS)])
        ]
        with openai_client(server, expected, is_lossy=is_lossy) as n_openai:
            for talk in talks:
                storm.blow("talk", talk.step)
            for i in range(2):
                storm.blow("cancel", cancel, server.client.bind(f"cancel {i}"), random.Random(i))
            storm.blow("garbage", send_garbage, server, random.Random(2))
            storm.blow("half", send_half, server, random.Random(3))
            storm.blow("killed", kill_client, server, random.Random(4))
            longest = watch(server, SECONDS / 3)
            warm = server.rss()
            longest = max(longest, watch(server, SECONDS * 2 / 3))
            storm.end()
        grown = server.rss() - warm
        assert storm.problems == []
        assert set(storm.counts) == {"talk", "cancel", "garbage", "half", "killed"}
        assert n_openai[0] > 0
        for talk in talks:
            talk.check()
        server.wait_until_idle()
        assert 1 < longest <= MOST_WAITING + 1
        assert grown < scale(24, 8) * MIB
        kv = check_afterwards(server)
        assert not is_lossy or kv["written_bytes"] <= 2 * WRITES  # midnight may have passed


def check_afterwards(server):
    """Assert that the server is well and ends; return kv_chunks' last status."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    with contextlib.closing(connection):
        connection.request("GET", "/health")
        assert connection.getresponse().status == 200
    metrics = server.metrics()
    answered = {
        name.partition('status="')[2].rstrip('"}')
        for name in metrics
        if name.startswith("llmaas_requests_total")
    }
    assert answered <= {"200", "201", "400", "404", "413", "415", "422", "429", "499"}
    assert {"200", "400", "429"} <= answered
    kv = server.kv()
    assert kv["ram_bytes"] + kv["buffer_bytes"] + kv["lent_bytes"] <= kv["ram_budget_bytes"]
    assert kv["faults"] == kv["io_errors"] == 0
    wait_until(lambda: server.n_files() < 64)
    assert server.n_threads() < 64
    assert server.stop() == 0
    assert "Traceback" not in server.log()
    return kv

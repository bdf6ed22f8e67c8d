"""The end of ``llmaas serve``: no new calls, grace for the running one, unchanged contexts."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import threading

import pytest
from installing import install_plugin
from served import ENDLESS, LONG_N_CTX, drain, launched, serving, wait_until

from llmaas_hooks import LlmaasError
from llmaas_plugins.service.context_log import ContextLog

openai = pytest.importorskip("openai")
pytest.importorskip("fastapi")

LONG = ENDLESS | {"max_tokens": 300}
SHORT = {"temperature": 0.0, "max_tokens": 4}
STORY = "Tell me a long story."


@pytest.fixture
def start(tmp_path):
    """Return a function that starts a server with some grace time."""

    def start(grace_s):
        return serving(tmp_path, service=f"shutdown_grace_s = {grace_s}", n_ctx=LONG_N_CTX)

    return start


class Caller(threading.Thread):
    """Thread that makes a call and keeps its result."""

    def __init__(self, call):
        super().__init__()
        self._call = call
        self.result = self.error = None
        self.start()

    def run(self):
        try:
            self.result = self._call()
        except Exception as error:
            self.error = error


def health(connection):
    connection.request("GET", "/health")
    with connection.getresponse() as response:
        return response.status, json.loads(response.read())


def recorded(server, context):
    """Return the stored record of a context, once the server has ended."""
    with contextlib.closing(ContextLog(server.folder / "state")) as log:
        return log.get(context.id, "mail")


@pytest.mark.slow
def test_the_running_call_finishes_and_the_waiting_ones_are_told(start):
    with start(grace_s=60) as server:
        app = server.client.bind("mail")
        contexts = [app.new_context("Somebody is here.") for _ in range(3)]
        probe = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        assert health(probe) == (200, {"status": "ok"})
        stream = contexts[0].stream(STORY, **LONG)
        first = next(stream)
        waiting = [Caller(lambda c=context: c.call("Hi", **SHORT)) for context in contexts[1:]]
        wait_until(lambda: server.status()["queue"] == 3)
        server.process.send_signal(signal.SIGTERM)
        for caller in waiting:
            caller.join(60)
            assert isinstance(caller.error, LlmaasError)
            assert "The service is stopping. Try again later. (HTTP 503)" in str(caller.error)
        status, found = health(probe)  # the connection stays, but the service refuses new calls
        assert (status, found) == (503, {"status": "stopping", "running": 1, "waiting": 0})
        with pytest.raises(LlmaasError, match="stopping"):
            app.new_context()
        probe.close()
        pieces, reply = drain(stream)
        assert (first + "".join(pieces)).strip() == reply["text"]
        assert server.process.wait(60) == 0
        assert "Traceback" not in server.log()
        records = [recorded(server, context) for context in contexts]
        assert [record.n_calls for record in records] == [1, 0, 0]
        assert records[0].messages[-1]["content"] == reply["text"]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["grace is over", "second signal"])
def test_a_stream_that_takes_too_long_leaves_its_context_as_it_was(start, how):
    with start(grace_s=0.2 if how == "grace is over" else 600) as server:
        context = server.client.bind("mail").new_context("Anna is here.")
        text = context.call("Hi", **SHORT)["text"]
        stream = context.stream(STORY, **ENDLESS)
        next(stream)
        server.process.send_signal(signal.SIGTERM)
        if how == "second signal":
            wait_until(lambda: is_stopping(server))
            server.process.send_signal(signal.SIGINT)
        with pytest.raises(LlmaasError, match=r"stopping.*\(HTTP 503\)"):
            drain(stream)
        assert server.process.wait(60) == 0
        assert "Traceback" not in server.log()
        state = server.folder / "state"
        files = {file.name for file in state.iterdir()}
        assert files == {"contexts.sqlite", "reserve"}  # no journal is left
    with start(grace_s=0) as again:
        record = again.client.bind("mail").context(context.id).record()
        assert (record["n_calls"], record["messages"][-1]["content"]) == (1, text)
        assert again.kv()["contexts"] == 1  # its cells were written
        assert again.client.bind("mail").context(context.id).call("Why?", **SHORT)["text"]
        assert again.kv()["restores"] == 1


def is_stopping(server):
    try:
        server.status()
    except LlmaasError as error:
        return "stopping" in str(error)
    return False


@pytest.mark.parametrize("how", ["call", "openai", "openai stream"])
def test_every_kind_of_call_ends_with_the_grace(start, how):
    with start(grace_s=0.1) as server:
        context = server.client.bind("mail").new_context()
        with openai.OpenAI(
            base_url=f"{server.address}/v1", api_key="none", max_retries=0
        ) as client:

            def complete(*, stream):
                own = {"extra_body": {"repeat_penalty": ENDLESS["repeat_penalty"]}}
                done = client.completions.create(
                    model="any", prompt="Once", stream=stream, temperature=0.0,
                    max_tokens=ENDLESS["max_tokens"], **own,
                )  # fmt: skip
                return list(done) if stream else done

            caller = Caller(
                {
                    "call": lambda: context.call(STORY, **ENDLESS),
                    "openai": lambda: complete(stream=False),
                    "openai stream": lambda: complete(stream=True),
                }[how]
            )
            wait_until(lambda: server.status()["queue"] == 1)
            assert server.stop() == 0
            caller.join(60)
        assert "stopping" in str(caller.error)
        assert "Traceback" not in server.log()
        assert recorded(server, context).n_calls == 0


def test_a_client_that_does_not_come_to_the_point_does_not_hold_it_up(start):
    with start(grace_s=0) as server:
        connections = [http.client.HTTPConnection("127.0.0.1", server.port) for _ in range(3)]
        for connection in connections:
            connection.connect()
        connections[1].send(b"POST /v1/chat/comp")
        connections[2].send(b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: 9\r\n\r\n{")
        wait_until(lambda: server.n_files() > 0)
        assert server.stop() == 0
        assert "Traceback" not in server.log()
        for connection in connections:
            connection.close()


@pytest.mark.parametrize("how", ["call", "stream"])
def test_a_killed_server_is_an_error_of_its_clients(start, how):
    with start(grace_s=0) as server:
        context = server.client.bind("mail").new_context()
        if how == "stream":
            stream = context.stream(STORY, **ENDLESS)
            next(stream)
            server.process.kill()
            with pytest.raises((ConnectionError, LlmaasError)):
                drain(stream)
        else:
            caller = Caller(lambda: context.call(STORY, **ENDLESS))
            wait_until(lambda: server.status()["queue"] == 1)
            server.process.kill()
            caller.join(60)
            assert isinstance(caller.error, ConnectionError)


SLOW_PLUGIN = """
import ctypes, pathlib
from llmaas_hooks import hookimpl
from pydantic import BaseModel

class Plugin:
    class Config(BaseModel):
        pass

    def __init__(self, config):
        pass

    @hookimpl
    def llmaas_model_load(self, load):
        pathlib.Path("loading").touch()
        rest = 600
        while rest:  # as libllama, which knows of no signals
            rest = ctypes.CDLL(None).sleep(rest)
"""


@pytest.fixture
def slow_plugin(tmp_path):
    """Install a plugin that makes loading a model slow."""
    environ = install_plugin(tmp_path, "slow", SLOW_PLUGIN)
    return {"config": "[plugins.slow]", "environ": environ}


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_ended_while_it_loads(tmp_path, slow_plugin, how):
    with launched(tmp_path, "--port", "0", **slow_plugin) as process:
        wait_until(lambda: (tmp_path / "loading").exists() or process.poll() is not None)
        process.send_signal(how)
        assert process.wait(60) == 0
        assert "Traceback" not in (tmp_path / "log").read_text()


HANGING_PLUGIN = """
import ctypes, pathlib
from llmaas_hooks import hookimpl
from pydantic import BaseModel

class Plugin:
    class Config(BaseModel):
        pass

    def __init__(self, config):
        pass

    @hookimpl
    def llmaas_decode(self, step):
        pathlib.Path("hangs").touch()
        while True:
            ctypes.CDLL(None).sleep(600)
"""


CONFIG = """
[service]
state_dir = "state"
shutdown_grace_s = {grace}
[plugins.hanging]
"""


def test_signals_end_it_though_a_call_hangs(tmp_path):
    environ = install_plugin(tmp_path, "hanging", HANGING_PLUGIN)
    settings = {"config": CONFIG.format(grace=600), "environ": environ}
    with serving(tmp_path, **settings) as server:
        context = server.client.bind("mail").new_context()
        caller = Caller(lambda: context.call("Hi", **SHORT))
        wait_until((tmp_path / "hangs").exists)
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: is_stopping(server))
        server.process.send_signal(signal.SIGINT)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 1
        caller.join(60)
        assert "ended without waiting any longer" in server.log()

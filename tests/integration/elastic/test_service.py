"""The level of a call to ``llmaas serve``, given in a body or in a header."""

from __future__ import annotations

import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
from preparing import prepare
from served import drain, serving, wait_until

from llmaas_hooks import ConfigError, LlmaasError
from llmaas_plugins import activate, elastic, without
from llmaas_plugins.config import ServiceConfig
from llmaas_plugins.service import LLMService

openai = pytest.importorskip("openai")
pytest.importorskip("fastapi")

CONFIG = """
on_error = "raise"
[service]
state_dir = "state"
[plugins.elastic]
level = 0.9
[plugins.kv_chunks]
codec = "lossless"
store = "kv"
"""
SHORT = {"temperature": 0.0, "max_tokens": 3}


@pytest.fixture(scope="module")
def model(reference_model, tmp_path_factory):
    return prepare(reference_model, tmp_path_factory.mktemp("model") / "model.gguf")


@pytest.fixture(scope="module")
def server(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("serve")
    with serving(folder, "--model", str(model), config=CONFIG) as server:
        yield server


@pytest.fixture
def levels(server):
    """Return the levels that were used since the last call."""

    def tokens():
        return server.status()["plugins"]["elastic"]["tokens"]

    before = tokens()

    def levels():
        now = tokens()
        found = {level for level in now if now[level] != before.get(level)}
        before.update(now)
        return found

    return levels


def test_the_openai_routes_take_a_header(server, levels):
    with openai.OpenAI(base_url=f"{server.address}/v1", api_key="none") as client:

        def ask(level, question, *, stream=False):
            done = client.chat.completions.create(
                model="any",
                messages=[{"role": "user", "content": question}],
                stream=stream,
                extra_body=SHORT,
                extra_headers={"X-LLMaaS-Level": level},
            )
            return list(done)

        ask("0.6", "Who sings?")
        assert levels() == {"0.6"}
        ask("0.4/0.8", "Who flies?", stream=True)
        assert levels() == {"0.4", "0.8"}
        ask("", "Who swims?")
        assert levels() == {"0.9"}
        with pytest.raises(openai.BadRequestError, match=r"X-LLMaaS-Level: .*0\.6.*found 'half'"):
            ask("half", "Who?")
    assert levels() == set()


def test_the_openai_routes_take_a_field(server, levels):
    with openai.OpenAI(base_url=f"{server.address}/v1", api_key="none") as client:

        def ask(level, **options):
            body = SHORT | {"level": level}
            list(client.completions.create(model="", prompt="I", extra_body=body, **options))

        ask(0.6, stream=True)
        assert levels() == {"0.6"}
        ask({"decode": 0.5}, extra_headers={"X-LLMaaS-Level": "0.8"})
        assert levels() == {"0.8", "0.5"}
        ask(None)
        assert levels() == {"0.9"}
        with pytest.raises(openai.BadRequestError, match=r"'level: the level must .* found 7\b"):
            ask(7)
    assert levels() == set()


def test_calls_take_a_field(server, levels):
    context = server.client.bind("mail").new_context()
    context.call("Who sings?", level=0.6, **SHORT)
    assert levels() == {"0.6"}
    drain(context.stream("Who flies?", level={"prefill": 0.3, "decode": 0.5}, **SHORT))
    assert levels() == {"0.3", "0.5"}
    context.call("Who swims?", level={"decode": 0.7}, **SHORT)
    assert levels() == {"0.9", "0.7"}
    said = r"^level: (the level must .* 0\.2 to 1\.0|expected .* prefill and decode).*\(HTTP 422\)$"
    for wrong in (0.1, "0.6", {"decoding": 0.5}):
        with pytest.raises(LlmaasError, match=said):
            context.call("Who?", level=wrong, **SHORT)
    assert levels() == set()
    assert len(context.record()["messages"]) == 6


def test_a_field_goes_before_a_header(server, levels):
    context = server.client.bind("mail").new_context()
    request = urllib.request.Request(
        f"{server.address}/v1/llmaas/apps/mail/contexts/{context.id}/call",
        json.dumps({"prompt": "Who dives?", "level": {"decode": 0.5}} | SHORT).encode(),
        {"Content-Type": "application/json", "X-LLMaaS-Level": "0.8"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        assert response.status == 200
    assert levels() == {"0.8", "0.5"}


def test_contexts_rest_at_what_is_configured(server, model, tmp_path):
    """As in an app without a service, contexts rest at the configured level after the last call."""

    def rests(status):
        (context,) = status["plugins"]["elastic"]["contexts"]
        return {context[name] for name in ("level", "prefill_level", "decode_level")} == {0.9}

    level = {"prefill": 0.4, "decode": 0.8}
    server.client.bind("mail").new_context().call("Who?", level=level, **SHORT)
    wait_until(lambda: rests(server.status()))
    with (
        activate({"on_error": "raise", "plugins": {"elastic": {"level": 0.9}}}) as suite,
        LLMService.open(model, ServiceConfig(state_dir=tmp_path), n_ctx=256) as service,
    ):
        service.bind("mail").new_context().call("Who?", level=level, **SHORT)
        assert rests(suite.status())


def test_numbers_by_level_are_metrics(server):
    server.client.bind("mail").new_context().call("Who?", level=0.6, **SHORT)
    tokens = server.status()["plugins"]["elastic"]["tokens"]
    assert server.metrics()['llmaas_elastic_tokens{key="0.6"}'] == tokens["0.6"] > 0


@pytest.mark.parametrize(
    ("plugins", "problem"),
    [({}, "the plugin elastic is not on"), ({"elastic": {}}, "`llmaas elastic prepare ")],
    ids=["off", "on"],
)
def test_a_service_without_levels_refuses(plugins, problem, tmp_path, make):
    with (
        activate({"plugins": plugins}),
        LLMService(make(), ServiceConfig(state_dir=tmp_path / "state")) as service,
    ):
        context = service.bind("mail").new_context()
        with pytest.raises(ConfigError, match=f"levels are not available: .*{problem}"):
            context.call("Who?", level=0.5)
        with pytest.raises(ConfigError, match=r"must be a number from 0\.2"):
            context.stream("Who?", level=5)
        assert context.call("Who?", max_tokens=1).finish_reason
        assert len(context.record().messages) == 2


def test_a_stream_of_a_block_that_is_read_elsewhere(model, tmp_path):
    """The level and the disabled plugins are those at the call, and so is the thread's level."""
    kv_chunks = {"store": str(tmp_path / "kv")}
    config = {"on_error": "raise", "plugins": {"elastic": {}, "kv_chunks": kv_chunks}}
    with (
        activate(config) as suite,
        LLMService.open(
            model, ServiceConfig(state_dir=tmp_path), n_ctx=256, n_threads=1
        ) as service,
    ):

        def report():
            suite.settle()
            found = suite.status()["plugins"]
            return set(found["elastic"]["tokens"]), found["kv_chunks"]["chunks"] > 0

        context = service.bind("mail").new_context()
        with elastic.level(0.5), without("kv_chunks"):
            stream = context.stream("Who flies?", **SHORT)
        with elastic.level(0.3), ThreadPoolExecutor(1) as pool:
            pool.submit(list, stream).result()
        assert report() == ({"0.5"}, False)
        context.call("And who sails?", **SHORT)
        assert report() == ({"0.5", "1.0"}, True)

"""The app of a request, as plugins learn it under ``llmaas serve``."""

from __future__ import annotations

import json

import pytest
from installing import install_plugin
from served import drain, serving

from llmaas_plugins.server.client import LLMClient

openai = pytest.importorskip("openai")
pytest.importorskip("fastapi")

ADMINISTRATOR, MAIL, NOTES = "sesame", "mail-0123456789abcdef", "notes-0123456789abcdef"
SHORT = {"temperature": 0.0, "max_tokens": 2}
MESSAGES = [{"role": "user", "content": "Hi"}]
PLUGIN = """
from llmaas_hooks import hookimpl
from pydantic import BaseModel

class Plugin:
    class Config(BaseModel):
        pass

    def __init__(self, config):
        self.seen = []

    @hookimpl
    def llmaas_request_begin(self, request):
        self.seen.append([request.context_id, request.app])

    @hookimpl
    def llmaas_status(self):
        return {"seen": list(self.seen)}
"""
CONFIG = """
on_error = "raise"
[service]
state_dir = "state"
{keys}
[plugins.callers]
"""


@pytest.fixture
def serve(tmp_path):
    """Start a server with the plugin, with or without keys."""
    environ = install_plugin(tmp_path, "callers", PLUGIN)
    (tmp_path / "keys.toml").write_text(f"mail = {json.dumps(MAIL)}\nnotes = {json.dumps(NOTES)}\n")
    (tmp_path / "keys.toml").chmod(0o600)

    def serve(*options, keys="", key=None):
        config = CONFIG.format(keys=keys)
        return serving(tmp_path, *options, config=config, environ=environ, key=key)

    return serve


def seen(server):
    """Return context and app of each request so far."""
    return [tuple(pair) for pair in server.status()["plugins"]["callers"]["seen"]]


def chat(server, key, *, stream=False):
    with openai.OpenAI(base_url=f"{server.address}/v1", api_key=key) as client:
        done = client.chat.completions.create(
            model="any", messages=MESSAGES, stream=stream, extra_body=SHORT
        )
        return list(done)


@pytest.mark.slow
def test_the_key_tells_the_app(serve):
    with serve("--api_key", ADMINISTRATOR, keys='key_file = "keys.toml"', key=ADMINISTRATOR) as on:
        for key, app in ((MAIL, "mail"), (NOTES, "notes"), (ADMINISTRATOR, None), (MAIL, "mail")):
            chat(on, key)
            chat(on, key, stream=True)
            assert seen(on)[-2:] == [(None, app)] * 2
        context = LLMClient(on.address, api_key=MAIL).bind("mail").new_context()
        context.call("Hi", **SHORT)
        drain(context.stream("Why?", **SHORT))
        assert seen(on)[-2:] == [(context.id, "mail")] * 2
        context = on.client.bind("notes").new_context()  # the administrator, for an app
        context.call("Hi", **SHORT)
        assert seen(on)[-1] == (context.id, "notes")


def test_without_keys_only_contexts_tell(serve):
    with serve() as on:
        chat(on, "none")
        context = on.client.bind("mail").new_context()
        context.call("Hi", **SHORT)
        chat(on, "none", stream=True)
        assert seen(on) == [(None, None), (context.id, "mail"), (None, None)]

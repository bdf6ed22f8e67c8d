"""The engines, servers and apps that several of these files use."""

from __future__ import annotations

import functools

import pytest
from limited import MAIL, ask, limited
from requested import Recorder

from llmaas_plugins.server.client import LLMClient


@pytest.fixture(scope="session")
def reference_model(light_model):
    """Return a light model: the tests of most files are about cells and calls, not about texts."""
    return light_model


@pytest.fixture
def make(make_llama):
    """Make a ``Llama`` that uses one thread and leaves the other processors free."""
    return functools.partial(make_llama, n_threads_batch=1)


@pytest.fixture
def recorder(patched):
    """Return a plugin that records requests, while the patches are applied."""
    recorder = Recorder()
    patched(recorder=recorder)
    return recorder


@pytest.fixture
def app(server, request):
    """Yield an app of the test's own on the file's ``server``, without contexts."""
    app = server.client.bind(request.node.name[:128])
    yield app
    for context in app.contexts():
        context.delete()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Start a server with keys and low limits, for files that start none of their own."""
    with limited(tmp_path_factory.mktemp("limits")) as server:
        yield server


@pytest.fixture
def mail(server):
    """Yield an app with a key, without contexts."""
    app = LLMClient(server.address, api_key=MAIL, timeout_s=120).bind("mail")
    yield app
    for context in app.contexts():
        context.delete()


@pytest.fixture
def request_(server):
    """Return a function that sends a request with this app's key and returns the answer."""
    return functools.partial(ask, server)

"""The engine and the app that several of these files use."""

from __future__ import annotations

import functools

import pytest


@pytest.fixture
def make(make_llama):
    """Make a ``Llama`` that leaves the other processors alone."""
    return functools.partial(make_llama, n_threads_batch=1)


@pytest.fixture
def app(server, request):
    """An app of the test's own on the file's ``server``, without contexts."""
    app = server.client.bind(request.node.name[:128])
    yield app
    for context in app.contexts():
        context.delete()

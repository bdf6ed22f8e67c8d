"""The engine that several of these files use."""

from __future__ import annotations

import functools

import pytest


@pytest.fixture
def make(make_llama):
    """Make a ``Llama`` that leaves the other processors alone."""
    return functools.partial(make_llama, n_threads_batch=1)

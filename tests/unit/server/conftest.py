"""A stub of a cloud, and a gateway that asks it."""

from __future__ import annotations

import pytest
from stub_cloud import StubCloud


@pytest.fixture
def stub():
    with StubCloud() as stub:
        yield stub


@pytest.fixture
def asking(stub):
    from asking_cloud import Asking  # needs the server's libraries

    return Asking(stub)

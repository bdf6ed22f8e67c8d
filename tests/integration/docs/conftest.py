"""The packaged model, with which the pages' examples run."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def reference_model(packaged_model):
    """Return the packaged model, as the examples do."""
    return packaged_model

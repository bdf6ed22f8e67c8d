"""The packaged model, which says words."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def reference_model(packaged_model):
    """Return the packaged model: words are chosen for what they tell it."""
    return packaged_model

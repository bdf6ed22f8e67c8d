"""The packaged model, which studies measure."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def reference_model(packaged_model):
    """Return the packaged model: studies compare what it says."""
    return packaged_model

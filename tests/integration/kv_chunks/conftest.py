"""A light model for tests that are about cells, whatever their values."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def reference_model(light_model):
    return light_model

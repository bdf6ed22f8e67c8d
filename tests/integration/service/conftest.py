"""Services in this process."""

from __future__ import annotations

import pytest
from in_process import ENGINE

from llmaas_plugins.service import LLMService, ServiceConfig


@pytest.fixture
def serve(make_llama, tmp_path):
    """Make a service with the given limits, on an engine of its own."""
    services = []

    def make(engine=None, **limits):
        folder = tmp_path / f"state-{len(services)}"
        service = LLMService(
            engine or make_llama(**ENGINE), ServiceConfig(state_dir=folder, **limits)
        )
        services.append(service)
        return service

    yield make
    for service in services:
        service.close()

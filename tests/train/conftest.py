"""Tests of learning compare with numbers that the processor computes, also where a GPU is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def _no_gpu(request: pytest.FixtureRequest) -> Iterator[None]:
    """Learn on the processor. ``test_device`` chooses its devices itself."""
    torch = pytest.importorskip("torch", reason="make test-train installs it")
    with pytest.MonkeyPatch.context() as patch:
        if request.module.__name__ != "test_device" and torch.cuda.is_available():
            for name in ("student", "distillation_costs"):
                patch.setattr(
                    f"llmaas_plugins.training.{name}.learning_device", lambda: torch.device("cpu")
                )
        yield

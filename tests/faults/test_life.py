"""Ten thousand rounds of contexts that come and go at any moment; see ``life_driver.py``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from elastic_models import shuffled
from soak import scale

N_PARTS = scale(1, 50)
N_SEEDS, N_ROUNDS = scale(1, 2), scale(25, 50)
DRIVER = Path(__file__).parent / "life_driver.py"
PLUGINS = {
    "kv_chunks": {"kv_chunks": {"codec": "lossless"}},
    "small, parked, elastic": {
        "kv_chunks": {"codec": "lossless", "ram_budget": "3 MiB", "parked_tokens": 256},
        "elastic": {},
    },
}


@pytest.fixture(scope="session")
def models(reference_model, tmp_path_factory):
    """A model file for each set of plugins."""
    prepared = tmp_path_factory.mktemp("models") / "prepared.gguf"
    shuffled(reference_model, prepared)
    return dict(zip(PLUGINS, (reference_model, prepared), strict=True))


@pytest.mark.soak
@pytest.mark.parametrize("plugins", PLUGINS)
@pytest.mark.parametrize("part", range(N_PARTS))
def test_contexts_that_come_and_go_at_any_moment(models, tmp_path, part, plugins):
    numbers = map(str, (part * N_SEEDS, N_SEEDS, N_ROUNDS))
    table = json.dumps(PLUGINS[plugins])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", DRIVER, *numbers, tmp_path, table, models[plugins]],
        capture_output=True,
        text=True,
        check=False,
    )
    last = (tmp_path / "operation").read_text()
    told = f"{last}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    assert (done.returncode, done.stdout) == (0, "whole\n"), told

"""Ten thousand rounds of contexts that come and go at any moment; see ``life_driver.py``."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import fork_server
import pytest
from datastores import built
from elastic_models import shuffled
from packed_models import pack
from soak import scale

N_PARTS = scale(1, 20)
N_SEEDS, N_ROUNDS = scale(1, 2), scale(25, 50)
HERE = Path(__file__).parent
LOSSLESS = {"codec": "lossless"}
KNN = {"k": 16, "look_back": 12, "drafts": True}
STREAMED = {"memory_budget": "1 MiB", "arena": "1 MiB"}
PLUGINS = {
    "kv_chunks": {"kv_chunks": LOSSLESS},
    "small, parked, elastic": {
        "kv_chunks": LOSSLESS | {"ram_budget": "3 MiB", "parked_tokens": 256},
        "elastic": {},
    },
    "streamed": {"flash_weights": STREAMED},
    "proposed": {"knn_lm": KNN | {"mix": False}},
    "all four": {
        "kv_chunks": LOSSLESS,
        "elastic": {},
        "flash_weights": STREAMED,
        "knn_lm": KNN | {"mix": True},
    },
}
DONE = {
    "kv_chunks": {"reused_tokens"},
    "small, parked, elastic": {"reused_tokens"},
    "streamed": {"streamed"},
    "proposed": {"proposed"},
    "all four": {"reused_tokens", "streamed", "proposed", "mixed", "words_mixed"},
}
"""Counters that must have moved for a run to be meaningful."""


@pytest.fixture(scope="session")
def prepared(reference_model, tmp_path_factory):
    """Return a model prepared for elastic and packed, and a datastore for it."""
    folder = tmp_path_factory.mktemp("prepared")
    path = shuffled(reference_model, folder / "model.gguf")
    pack(path)
    return path, built(path, folder / "knn")


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("plugins", PLUGINS)
@pytest.mark.parametrize("part", range(N_PARTS))
def test_contexts_that_come_and_go_at_any_moment(
    reference_model, prepared, tmp_path, part, plugins
):
    numbers = map(str, (part * N_SEEDS, N_SEEDS, N_ROUNDS))
    model, store = prepared
    if plugins == "kv_chunks":
        model = reference_model
    table = json.loads(json.dumps(PLUGINS[plugins]))
    if "knn_lm" in table:
        table["knn_lm"]["store"] = str(store)
    done = fork_server.run(
        [sys.executable, "-m", "life_driver", *numbers, tmp_path, json.dumps(table), model],
        capture_output=True,
        text=True,
        timeout=None,
        env=os.environ | {"PYTHONPATH": f"{HERE}:{HERE.parent / 'support'}"},
    )
    last = (tmp_path / "operation").read_text()
    told = f"{last}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    assert done.returncode == 0, told
    happened = {name for name, n in json.loads(done.stdout).items() if n}
    assert happened >= DONE[plugins], told

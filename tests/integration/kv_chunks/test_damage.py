"""Damaged stores under an app: intact chunks are used, the rest is evaluated, texts are equal."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sqlite3

import damages
import llama_cpp
import numpy as np
import pytest
from background import chunks_at_rest
from llama_cpp import Llama

from llmaas_hooks import CodecError, Request
from llmaas_plugins import _native, activate
from llmaas_plugins._native import (
    Codec,
    KVGeometry,
    blob_init,
    blob_size,
    chunk_bound,
    chunk_encode,
)
from llmaas_plugins.kv_chunks.store.extents import page_round
from llmaas_plugins.kv_chunks.transfer.cell_layout import pack_layout
from llmaas_plugins.kv_chunks.transfer.cells import KVCells

RNG = np.random.default_rng(3)
PROMPT = [1, *RNG.integers(300, 4000, 179).tolist()]  # 11 chunks and a piece
FOREIGN = [1, *RNG.integers(300, 4000, 40).tolist()]
N_TOKENS = 8
BUDGETS = {  # RAM budgets, which decide the size of the transfer buffers
    "one segment": "256 MiB",
    "segments of chunks": "4 MiB",
    "segments of one chunk": "1 MiB",
}


@pytest.fixture(scope="module")
def vanilla_answer(reference_model):
    settings = {"n_ctx": 256, "verbose": False, "n_threads": 1, "n_threads_batch": 1}
    with contextlib.closing(Llama(str(reference_model), **settings)) as llama:
        return ask(llama, PROMPT)


@pytest.fixture(scope="module")
def original(reference_model, tmp_path_factory):
    """Return the files of a store that holds the prompt's context."""
    directory = tmp_path_factory.mktemp("original") / "kv"
    config = {"plugins": {"kv_chunks": {"codec": "lossless", "store": str(directory)}}}
    with activate(config):
        settings = {"n_ctx": 256, "verbose": False, "n_threads": 1, "n_threads_batch": 1}
        with contextlib.closing(Llama(str(reference_model), **settings)) as llama:
            ask(llama, PROMPT, 1)
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.fixture
def kv(original, tmp_path):
    directory = tmp_path / "kv"
    directory.mkdir(mode=0o700)
    for name, content in original.items():
        (directory / name).write_bytes(content)
    return directory


def ask(llama, tokens, n=N_TOKENS):
    generator = llama.generate(tokens, temp=0.0)
    found = [next(generator) for _ in range(n)]
    generator.close()
    return found


def report(suite):
    """Return the plugin's status; nothing may be pinned between requests."""
    store = chunks_at_rest(suite)
    assert all(chunk.pins == 0 for chunk in store.tree)
    return suite.status()["plugins"]["kv_chunks"]


def row(kv, i):
    """Return the key, file offset and size of the prompt's chunk ``i``."""
    tokens = np.array(PROMPT[16 * i : 16 * (i + 1)], "<i4").tobytes()
    with contextlib.closing(sqlite3.connect(kv / "index.sqlite")) as db:
        found = db.execute("SELECT key, offset, size FROM chunks WHERE tokens = ?", (tokens,))
        key, offset, size = found.fetchone()
    return key, 4096 + offset, size


def edit(kv, statement, *values):
    with contextlib.closing(sqlite3.connect(kv / "index.sqlite")) as db:
        db.execute(statement, values)
        db.commit()


def flip(kv, i):
    """Flip a bit in the middle of chunk ``i``."""
    _, offset, size = row(kv, i)
    damages.flip(kv / "chunks.slab", offset + size // 2)


def forge(kv, i):
    """Replace a chunk by one of another geometry, with the right key and checksum."""
    key, offset, _ = row(kv, i)
    geometry = KVGeometry(2, False, 1, 1, (128, 128), (128, 128))
    blob, out = np.zeros(blob_size(geometry, 16), np.uint8), bytearray(60_000)
    blob_init(geometry, blob, range(16))
    bound = chunk_bound(geometry, Codec.RAW, 16)
    size = chunk_encode(geometry, Codec.RAW, blob, 16, 0, 16, key, memoryview(out)[:bound])
    damages.overwrite(kv / "chunks.slab", offset, out[: page_round(size)])
    edit(kv, "UPDATE chunks SET size = ? WHERE key = ?", size, key)


@pytest.mark.parametrize("budget", BUDGETS.values(), ids=BUDGETS)
@pytest.mark.parametrize(("damage", "i"), [(flip, 0), (flip, 8), (forge, 4), (forge, 8)])
def test_damaged_chunk_alone_is_evaluated_again(make, suite, kv, vanilla_answer, budget, damage, i):  # noqa: PLR0917
    damage(kv, i)
    active = suite(ram_budget=budget)
    llama = make()
    assert ask(llama, PROMPT) == vanilla_answer
    found = report(active)
    assert found["faults"] == 1
    assert found["restored_tokens"] == len(PROMPT) - 16
    ask(llama, FOREIGN, 1)
    assert ask(llama, PROMPT) == vanilla_answer  # the gap was closed
    found = report(active)
    assert found["faults"] == 1
    assert found["restored_tokens"] == 2 * len(PROMPT) - 16
    llama.close()


@pytest.mark.parametrize("budget", BUDGETS.values(), ids=BUDGETS)
def test_much_damage_is_met_one_by_one(make, suite, kv, vanilla_answer, budget):
    for i in (2, 5, 6, 8):
        flip(kv, i)
    active = suite(ram_budget=budget)
    llama = make()
    for _ in range(4):
        assert ask(llama, PROMPT) == vanilla_answer
        ask(llama, FOREIGN, 1)
    found = report(active)
    assert 1 <= found["faults"] <= 4
    llama.close()


def test_damage_behind_cells_that_stayed(make, suite, kv, vanilla_answer):
    flip(kv, 8)
    active = suite()
    llama = make()
    ask(llama, [*PROMPT[:70], *FOREIGN[1:]], 1)  # loads the beginning
    assert ask(llama, PROMPT) == vanilla_answer
    found = report(active)
    assert found["faults"] == 1
    assert found["restored_tokens"] == 70 + len(PROMPT) - 64 - 16
    llama.close()


def test_lost_slab_is_a_new_start(make, suite, kv, vanilla_answer):
    os.truncate(kv / "chunks.slab", 4096)
    active = suite()
    llama = make()
    assert ask(llama, PROMPT) == vanilla_answer
    ask(llama, FOREIGN, 1)
    assert ask(llama, PROMPT) == vanilla_answer
    found = report(active)
    assert found["restores"] == 1
    assert found["faults"] == 12
    llama.close()


@pytest.mark.parametrize("budget", BUDGETS.values(), ids=BUDGETS)
@pytest.mark.parametrize(("damaged", "n_kept"), [(None, 0), (8, 0), (0, 0), (8, 40), (3, 40)])
def test_cells_are_those_that_were_promised(make, suite, kv, budget, damaged, n_kept):  # noqa: PLR0917
    """A restore leaves exactly the reported positions behind, and its scratch sequence empty."""
    if damaged is not None:
        flip(kv, damaged)
    active = suite(ram_budget=budget)
    llama = make()
    ask(llama, [*PROMPT[:n_kept], *FOREIGN[1:]], 1)
    engine = active._installed._host.engine(llama)
    engine.settle()
    request = Request(engine, np.array(PROMPT[:173], np.int32), None)
    with engine.lent():
        restored = active.hooks.kv_restore(request)
    n_recomputed = 0 if damaged is None else 16
    assert restored.n_tokens == 173
    assert restored.n_loaded == 173 - n_kept // 16 * 16 - n_recomputed
    memory = llama_cpp.llama_get_memory(llama.ctx)
    assert llama_cpp.llama_memory_seq_pos_max(memory, 0) == 172
    assert llama_cpp.llama_memory_seq_pos_min(memory, 0) == 0
    assert llama_cpp.llama_memory_seq_pos_max(memory, 1) == -1
    report(active)
    llama.close()


def summed(layout):
    return pack_layout(KVGeometry.from_json(layout))


LAYOUTS = {
    "no JSON": lambda layout: "{",
    "a list": lambda layout: "[1]",
    "infinite": lambda layout: json.dumps(layout | {"n_layer": float("inf")}),
    "too large": lambda layout: json.dumps(layout | {"n_layer": 10**30}),
    "other rows": lambda layout: json.dumps(layout | {"k_row": [128] * layout["n_layer"]}),
    "other rows, rightly summed": lambda layout: summed(
        layout | {"k_row": [128] * layout["n_layer"]}
    ),
    "huge rows, rightly summed": lambda layout: summed(
        layout | dict.fromkeys(("k_row", "v_row"), [1 << 20] * layout["n_layer"])
    ),
    "many layers, rightly summed": lambda layout: summed(
        layout | {"n_layer": 1024, "k_row": [256] * 1024, "v_row": [256] * 1024}
    ),
    "of an earlier version": lambda layout: json.dumps(
        {name: value for name, value in layout.items() if name != "sum"}
    ),
    "V the other way": lambda layout: json.dumps(layout | {"v_trans": not layout["v_trans"]}),
}


@pytest.mark.parametrize("change", LAYOUTS.values(), ids=LAYOUTS)
def test_wrong_layout_costs_one_evaluation(make, suite, kv, vanilla_answer, change):
    with contextlib.closing(sqlite3.connect(kv / "index.sqlite")) as db:
        (layout,) = db.execute(
            "SELECT layout FROM geometry WHERE layout LIKE '%n_layer%'"
        ).fetchone()
    edit(
        kv,
        "UPDATE geometry SET layout = ? WHERE layout LIKE '%n_layer%'",
        change(json.loads(layout)),
    )
    active = suite(ram_budget="16 MiB")
    llama = make()
    assert ask(llama, PROMPT) == vanilla_answer
    assert report(active)["left_alone"] == []
    ask(llama, FOREIGN, 1)
    before = report(active)["restored_tokens"]
    assert ask(llama, PROMPT) == vanilla_answer
    assert report(active)["restored_tokens"] == before + len(PROMPT)
    llama.close()
    active = suite()
    llama = make()
    assert ask(llama, PROMPT) == vanilla_answer
    assert report(active)["restored_tokens"] == len(PROMPT)
    llama.close()


def refuses(*_):
    return False


def finds_others(*_):
    raise CodecError("other cells")


BREAKS = {
    "the engine refused stored cells": (KVCells, "replace", refuses),
    "are not saved: other cells": (_native, "blob_check", finds_others),
}


@pytest.mark.parametrize("told", BREAKS)
def test_an_engine_that_goes_on_failing_is_told_once(make, suite, kv, caplog, told):
    caplog.set_level(logging.INFO)
    suite()
    llama = make()
    prompts = [FOREIGN, PROMPT]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(*BREAKS[told])
        patch.setattr(_native, "landings_fit", refuses)  # loads go through buffers
        for prompt in prompts * 3:
            ask(llama, prompt, 1)
    for prompt in prompts:
        ask(llama, prompt, 1)
    llama.close()
    assert caplog.text.count(told) == 1
    assert caplog.text.count("it works again, after") == 1


def test_an_unusable_layout_is_told_once(make, suite, kv, caplog):
    edit(kv, "UPDATE geometry SET layout = '{' WHERE layout LIKE '%n_layer%'")
    suite()
    llama = make()
    for i in range(5):  # too short to be saved, so nothing repairs the damage
        ask(llama, PROMPT[: 3 + i], 1)
    llama.close()
    assert caplog.text.count("stored layout of this model's cells is invalid") == 1


def test_full_disk_leaves_the_app_alone(make, suite, tmp_path, vanilla_answer):
    active = suite()
    llama = make()
    active.evict("x")  # opens the store
    fd = active.plugin("kv_chunks")._store._residency.disk.fd
    full, kept = os.open("/dev/full", os.O_RDWR), os.dup(fd)
    os.dup2(full, fd)
    for _ in range(2):
        assert ask(llama, PROMPT) == vanilla_answer
        assert ask(llama, FOREIGN, 1)
    found = report(active)
    assert found["io_errors"] > 0
    assert found["chunks"] == found["ram_bytes"] == 0
    os.dup2(kept, fd)
    assert ask(llama, PROMPT) == vanilla_answer
    assert report(active)["chunks"] > 0
    os.close(kept)
    os.close(full)
    llama.close()

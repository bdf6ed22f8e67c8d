"""Contexts stay in the engine's cells without being asked for, where a memory budget has room."""

from __future__ import annotations

import json

import pytest
from flash_apps import run

SCRIPT = """
import tempfile
settings = dict(n_ctx=512, n_batch=256, n_threads=1, n_threads_batch=1, verbose=False)
def ask(llama, i, ending):
    prompt = [1, 300 + i] + [(7 * i + j) % 2000 + 50 for j in range(200)]
    stream = llama.generate(prompt + [400 + j for j in range(ending)], temp=0.0)
    found = [next(stream) for _ in range(2)]
    stream.close()
    return found
with tempfile.TemporaryDirectory() as folder:
    llama = Llama(path, **settings)
    expected = [ask(llama, i, ending) for ending in range(3) for i in range(4)]
    llama.close()
    budget = resident_bytes() + room * MIB
    table = {"store": folder} | kv
    config = {"on_error": "raise", "memory": {"budget": budget}, "plugins": {"kv_chunks": table}}
    suite = activate(config)
    open("/proc/self/clear_refs", "w").write("5")
    llama = Llama(path, **settings)
    found = [ask(llama, i, ending) for ending in range(3) for i in range(4)]
    suite.settle()
    report = suite.status()["plugins"]["kv_chunks"]
    over = peak() - budget
    llama.close()
    suite.deactivate()
print(json.dumps([found == expected, report, over]))
"""


def used_in_turn(path, room, **table):
    """Return whether the text is vanilla's, the plugin's report, and bytes above the budget.

    Args:
        path: Model that four contexts use in turn, three times.
        room: MiB that the budget leaves.
        table: Settings of the plugin.
    """
    prelude = f"room, kv = {room}, json.loads({json.dumps(json.dumps(table))})\n"
    return run(path, prelude + SCRIPT)


def test_contexts_that_fit_stay_in_cells(reference_model):
    is_same, report, over = used_in_turn(reference_model, 120)
    assert is_same
    assert report["takes"] == 8  # each context's second and third request
    assert (report["ram_hits"], report["disk_hits"]) == (0, 0)
    assert over <= 0


@pytest.mark.parametrize(
    ("room", "table"), [(120, {"codec": "lossless"}), (120, {"parked_tokens": 0}), (30, {})]
)
def test_they_do_not_where_bits_must_be_equal_where_unwanted_and_where_none_fits(
    reference_model, room, table
):
    _, report, over = used_in_turn(reference_model, room, **table)
    assert report.get("takes", 0) == 0
    assert over <= 0

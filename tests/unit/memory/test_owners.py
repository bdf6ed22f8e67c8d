"""Who has which memory: the sum is the process's memory, and each owner says why."""

from __future__ import annotations

import json

import numpy as np
import pytest

from llmaas_hooks import HookManager, MemoryClaim, hookimpl
from llmaas_plugins.memory import owners as module
from llmaas_plugins.memory.division import divide, values
from llmaas_plugins.memory.owners import owner_lines, owners

MIB = 1 << 20
POINTS = ((0, 0.0), (100 * MIB, 0.1))


@pytest.fixture(autouse=True)
def process(monkeypatch):
    """Let the process have 200 MiB, 50 of which are mapped."""
    monkeypatch.setattr(module, "resident_bytes", lambda: 200 * MIB)
    monkeypatch.setattr(module, "mapped_bytes", lambda: 50 * MIB)


def moves(owner, held, taken=None, points=POINTS):
    return MemoryClaim(owner, held * MIB, 100 * MIB, points, lambda _: None, 0, taken, "why")


def test_the_sum_is_the_memory_of_the_process():
    claims = [
        moves("contexts", 60, 20 * MIB),
        moves("weights", 40),
        MemoryClaim.reserved("buffers", 10 * MIB, "weights pass through them"),
    ]
    report = owners(claims)
    found = {one["owner"]: one for one in report["owners"]}
    assert {name: one["bytes"] // MIB for name, one in found.items()} == {
        "the rest": 80,
        "mapped files": 50,
        "weights": 40,
        "contexts": 20,
        "buffers": 10,
    }
    assert sum(one["bytes"] for one in report["owners"]) == report["resident_bytes"]
    assert found["contexts"]["may_use_bytes"] == 60 * MIB
    assert {one["kind"] for one in found.values()} == {"movable", "reserved", "rest"}
    assert found["buffers"]["why"] == "weights pass through them"
    assert found["weights"]["why"] == (
        "why; the last MiB saves 1 ms a second, one more would save 1"
    )
    worth = [found["weights"][f"saved_s_by_{which}_mib"] for which in ("last", "next")]
    assert worth == pytest.approx([0.001, 0.001])
    assert found["buffers"]["saved_s_by_last_mib"] is None


def test_of_what_nothing_is_known():
    (one, *_) = owners([moves("contexts", 190, points=((0, 0.0),))])["owners"]
    assert one["why"] == "why; nothing is known yet of the time that this saves"
    assert one["saved_s_by_next_mib"] is None


def test_what_is_known_to_save_nothing():
    (one, *_) = owners([moves("contexts", 190, points=((0, 0.0), (100 * MIB, 0.0)))])["owners"]
    assert one["why"] == "why; the last MiB saves 0 ms a second, one more would save 0"
    assert one["saved_s_by_next_mib"] == 0


def test_claims_of_more_than_there_is_leave_no_rest():
    found = {one["owner"]: one["bytes"] for one in owners([moves("contexts", 190)])["owners"]}
    assert found["the rest"] == 0


def test_the_table_is_aligned():
    head, first, *_, last = owner_lines(owners([moves("contexts in RAM", 190)]))
    assert head.index("why") == first.index("why; the last")
    assert first.startswith("contexts in RAM  190.0    190.0  100.0  movable")
    assert last.startswith("together")
    assert last.endswith("no budget")


@pytest.mark.parametrize(
    "sizes",
    [(-1, 5), (1 << 60, 1 << 60), (float("nan"), 5), (5, float("nan")), (5.5, 6), ("5", 6)],
    ids=str,
)
def test_hostile_sizes_are_refused(sizes):
    class Plugin:
        @hookimpl
        def llmaas_memory(self):
            return [MemoryClaim("it", *sizes, (), lambda _: None)]

    hooks = HookManager("log")
    hooks.register("p", Plugin())
    assert hooks.memory() == []
    assert "expected sizes from 0" in hooks.errors()["p"]["llmaas_memory"]["last"]


@pytest.mark.parametrize("points", [((float("nan"), 1.0),), ((5, float("nan")),), ((5, 1e400),)])
def test_hostile_points_are_refused(points):
    class Plugin:
        @hookimpl
        def llmaas_memory(self):
            return [MemoryClaim("it", 5, 10, points, lambda _: None)]

    hooks = HookManager("log")
    hooks.register("p", Plugin())
    assert hooks.memory() == []


def test_a_claim_of_all_memory_that_there_could_be_is_divided():
    huge = MemoryClaim("it", 1 << 50, 1 << 50, ((0, 0.0), (1 << 50, 1e9)), lambda _: None)
    assert divide(100 * MIB, [huge, moves("weights", 40)])[0] == 100 * MIB
    assert values(huge).next == 0


def test_sizes_of_numpy_are_told_as_json():
    sizes = (np.int64(4 * MIB), np.int64(100 * MIB))

    class Plugin:
        @hookimpl
        def llmaas_memory(self):
            return [MemoryClaim("it", *sizes, POINTS, lambda _: None, np.int32(2), np.uint32(3))]

    hooks = HookManager("raise")
    hooks.register("p", Plugin())
    claims = hooks.memory()
    assert json.loads(json.dumps(owners(claims))) == owners(claims)
    assert [type(size) for size in divide(50 * MIB, claims)] == [int]

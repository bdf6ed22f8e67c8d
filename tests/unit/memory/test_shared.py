"""The memory budget of a process: kept, divided, changed and given up."""

from __future__ import annotations

import functools
import gc
import threading
import weakref

import pytest

from llmaas_hooks import ConfigError, MemoryClaim, UnmetBudgetError
from llmaas_plugins import process_memory
from llmaas_plugins.memory import shared
from llmaas_plugins.memory.shared import SharedMemory

MIB = 1 << 20


@pytest.fixture(autouse=True)
def apart(monkeypatch):
    """Keep limits and users of other tests out."""
    monkeypatch.setattr(process_memory, "_limits", set())
    monkeypatch.setattr(process_memory, "_users", set())
    monkeypatch.setattr(process_memory, "_keepers", set())
    monkeypatch.setattr(shared, "_EVERY_S", 60.0)  # tests look themselves
    monkeypatch.setattr(shared, "_DIVIDE_S", 0.0)


class Process:
    """A process of ``fixed`` bytes beside two holders of memory that can be given back."""

    def __init__(self, monkeypatch, fixed=100):
        self.fixed = fixed * MIB
        self.held = {"weights": 0, "contexts": 0}
        self.saved = {"weights": (), "contexts": ()}
        monkeypatch.setattr(shared, "resident_bytes", self.resident_bytes)
        monkeypatch.setattr(process_memory, "available_bytes", lambda: self.system or 1 << 40)
        self.system = self.peak = 0
        self.fails = False
        process_memory.add_user(self)

    def resident_bytes(self):
        return self.fixed + sum(self.held.values())

    def claims(self):
        if self.fails:
            raise OSError("the disk is full")
        return [
            MemoryClaim(
                name,
                held,
                400 * MIB,
                ((0, 0.0), *self.saved[name]),
                functools.partial(self.resize, name),
            )
            for name, held in self.held.items()
        ]

    def resize(self, name, n_bytes):
        self.held[name] = n_bytes
        self.peak = max(self.peak, self.resident_bytes())

    @property
    def releasable_bytes(self):
        return sum(self.held.values())

    @property
    def promised_bytes(self):
        return 0

    def release(self, n_bytes):
        before = self.releasable_bytes
        for name in ("contexts", "weights"):
            self.held[name] -= min(self.held[name], n_bytes - (before - self.releasable_bytes))
        return before - self.releasable_bytes


@pytest.fixture
def process(monkeypatch):
    return Process(monkeypatch)


@pytest.fixture
def memory(process):
    """Return a budget of 306 MiB, of which 200 can be divided."""
    made = SharedMemory(306 * MIB, process.claims)
    made._start()
    yield made
    made.llmaas_shutdown()


def held(process):
    return {name: n // MIB for name, n in process.held.items()}


def test_memory_moves_to_whom_it_saves_most(process, memory):
    process.held = {"weights": 150 * MIB, "contexts": 50 * MIB}
    process.saved = {"weights": ((400 * MIB, 0.1),), "contexts": ((120 * MIB, 0.6),)}
    memory.look()
    assert held(process) == {"weights": 80, "contexts": 120}
    assert process.peak == 300 * MIB
    report = memory.llmaas_status()
    assert report["moves"] == 1
    assert report["last_moves"][0]["bytes"]["contexts"] == [50 * MIB, 120 * MIB]


def test_small_gains_and_a_second_move_at_once_are_not_worth_it(process, memory):
    process.held = {"weights": 100 * MIB, "contexts": 100 * MIB}
    process.saved = {"weights": ((400 * MIB, 0.40),), "contexts": ((400 * MIB, 0.42),)}  # 5 % more
    memory.look()
    assert held(process) == {"weights": 100, "contexts": 100}
    process.saved["contexts"] = ((400 * MIB, 0.6),)
    memory.look()
    assert held(process) == {"weights": 0, "contexts": 200}
    process.saved["contexts"] = ((400 * MIB, 0.1),)
    memory.look()
    assert held(process) == {"weights": 0, "contexts": 200}
    memory._moved_at -= shared._PAUSE_S
    memory.look()
    assert held(process) == {"weights": 200, "contexts": 0}
    assert memory.llmaas_status()["moves"] == 2


def test_who_got_memory_last_may_get_more_at_once(process, memory):
    process.held = {"weights": 200 * MIB, "contexts": 0}
    for most in (40, 80, 120):  # contexts that come one after the other
        process.saved = {"weights": ((400 * MIB, 0.1),), "contexts": ((most * MIB, 0.6),)}
        memory.look()
        assert held(process) == {"weights": 200 - most, "contexts": most}
    process.saved = {"weights": ((400 * MIB, 0.9),)}
    memory.look()
    assert held(process)["contexts"] == 120  # others wait
    assert memory.llmaas_status()["moves"] == 3


@pytest.mark.parametrize(
    ("failing", "left"),
    [("weights", {"weights": 150, "contexts": 50}), ("contexts", {"weights": 80, "contexts": 50})],
)
def test_a_claim_that_cannot_be_resized(process, memory, caplog, failing, left):
    """The others release memory, but none takes memory that was not released."""
    process.held = {"weights": 150 * MIB, "contexts": 50 * MIB}
    process.saved = {"weights": ((400 * MIB, 0.1),), "contexts": ((120 * MIB, 0.6),)}
    resize = process.resize

    def fail(name, n_bytes):
        if name == failing:
            raise OSError("the disk is full")
        resize(name, n_bytes)

    process.resize = fail
    memory.look()
    assert held(process) == left
    assert f"{failing} cannot be resized: the disk is full" in caplog.text


def test_without_knowledge_nothing_moves(process, memory):
    process.held = {"weights": 100 * MIB, "contexts": 100 * MIB}
    memory.look()
    assert held(process) == {"weights": 100, "contexts": 100}


def test_a_lower_budget_is_met_at_once(process, memory):
    process.held = {"weights": 150 * MIB, "contexts": 50 * MIB}
    memory.set_budget("226 MiB")
    assert process.resident_bytes() <= (226 - 6) * MIB
    memory.set_budget(400 * MIB)
    assert process_memory.budget() == 400 * MIB


def test_a_budget_that_cannot_be_met_changes_nothing(process, memory):
    with pytest.raises(UnmetBudgetError, match=r"budget of 50 MiB cannot be met.* 106 MiB or more"):
        memory.set_budget("50 MiB")
    assert process_memory.budget() == memory.llmaas_status()["budget"] == 306 * MIB
    with pytest.raises(ConfigError, match="found '3 GB of it'"):
        memory.set_budget("3 GB of it")


def test_what_the_system_can_give_limits_it_too(process, memory):
    process.held = {"weights": 100 * MIB, "contexts": 90 * MIB}
    process.system = 200 * MIB
    memory.look()
    assert process_memory.budget() == int(0.9 * process.system)
    assert process.resident_bytes() <= 0.9 * process.system - 6 * MIB
    process.system = 0
    memory.look()
    assert process_memory.budget() == 306 * MIB


def test_a_failure_is_logged_once_and_tried_again(process, memory, caplog):
    process.fails = True
    for _ in range(2 * shared._FEW):
        memory.look()
    assert [record.message for record in caplog.records if "the disk is full" in record.message]
    assert len([r for r in caplog.records if r.name == "llmaas.memory"]) == 1
    process.fails = False
    process.held = {"weights": 150 * MIB, "contexts": 50 * MIB}
    process.saved = {"weights": ((400 * MIB, 0.1),), "contexts": ((120 * MIB, 0.6),)}
    memory.look()
    assert held(process)["contexts"] == 120


def test_the_status_says_as_long_as_it_is_so_that_the_budget_cannot_be_met(process, memory):
    found = []
    for fixed in (100, *[400] * (shared._FEW + 2), 100):
        process.fixed = fixed * MIB
        memory.look()
        found.append(memory.llmaas_status()["unmet"])
    *moment, first, second, last = found
    assert not any(moment)  # it may be so only for a while
    assert all("a memory budget of 306 MiB cannot be met" in one for one in (first, second))
    assert last is None


def test_another_keeper_of_the_budget_answers_instead(process, memory):
    assert memory.room() == (306 - 6 - 100) * MIB
    assert memory.grant(1 << 40) == 200 * MIB

    class Keeper:
        def room(self):
            return 5

        def grant(self, n_bytes):
            return min(5, n_bytes)

        def enforce(self, *, waits):
            pass

    keeper = Keeper()
    process_memory.add_limit(keeper)
    assert memory.room() is None
    assert process_memory.room() == 5
    assert process_memory.grant(100) == 5


def test_the_thread_ends_with_the_plugin(process, monkeypatch):
    monkeypatch.setattr(shared, "_EVERY_S", 0.01)
    looked = threading.Event()

    def claims():
        looked.set()
        return []

    memory = SharedMemory(306 * MIB, claims)
    memory._start()
    assert looked.wait(5)
    (thread,) = [one for one in threading.enumerate() if one.name == "llmaas-memory"]
    memory.llmaas_shutdown()
    thread.join(5)
    assert not thread.is_alive()
    assert process_memory.budget() is None


def test_the_thread_does_not_keep_the_plugin(process, monkeypatch):
    monkeypatch.setattr(shared, "_EVERY_S", 0.01)
    memory = SharedMemory(306 * MIB, list)
    memory._start()
    (thread,) = [one for one in threading.enumerate() if one.name == "llmaas-memory"]
    reference = weakref.ref(memory)
    del memory
    for _ in range(200):
        gc.collect()
        if reference() is None:
            break
        thread.join(0.02)
    thread.join(5)
    assert not thread.is_alive()


def test_a_claim_of_which_nothing_is_known_keeps_what_it_has(process, memory):
    process.held = {"weights": 20 * MIB, "contexts": 100 * MIB}
    process.saved["weights"] = ((400 * MIB, 0.4),)
    memory.look()
    assert held(process) == {"weights": 100, "contexts": 100}


def test_memory_that_nobody_had_is_used_at_once(process, memory):
    process.held = {"weights": 0, "contexts": 0}
    process.saved["contexts"] = ((400 * MIB, 1e-9),)
    memory.look()
    assert held(process)["contexts"] == 200
    memory.set_budget("506 MiB")
    memory.look()
    assert held(process)["contexts"] == 400
    assert memory.llmaas_status()["moves"] == 0


def test_what_cannot_be_met_takes_nothing_from_contexts(process, memory):
    process.held = {"weights": 0, "contexts": 90 * MIB}
    with pytest.raises(UnmetBudgetError):
        memory.set_budget("50 MiB")
    assert held(process)["contexts"] == 90


def test_an_ended_budget_says_nothing_to_the_next_one(process):
    memory = SharedMemory(306 * MIB, process.claims)
    memory._start()
    memory.llmaas_shutdown()
    memory.set_budget("400 MiB")
    assert process_memory.budget() is None
    memory.look()
    assert process_memory.budget() is None


def test_who_keeps_what_it_has_is_not_bound_to_it(process, memory):
    """It may go on to take what it needs, as long as nothing else is known."""
    process.held = {"weights": 20 * MIB, "contexts": 100 * MIB + 4096}
    process.saved["weights"] = ((400 * MIB, 0.4),)
    resized = []
    process.resize = lambda name, n_bytes: resized.append((name, n_bytes))
    memory.look()
    assert [name for name, _ in resized] == ["weights"]


def test_a_child_does_not_start_what_ended(process):
    memory = SharedMemory(306 * MIB, process.claims)
    memory._start()
    memory.llmaas_shutdown()
    process.held = {"weights": 0, "contexts": 250 * MIB}
    memory.before_fork()
    memory.after_fork(in_child=True)
    memory.look()
    assert held(process)["contexts"] == 250


def test_a_budget_is_judged_by_what_is_held_now(process, memory):
    """A keeper of weights looks at them from time to time, and they may have grown since."""

    class Weights:
        def __init__(self):
            self.seen = 0

        def room(self):
            return (
                memory.in_force - process_memory.SPARE_BYTES - process.fixed - 90 * MIB + self.seen
            )

        def refresh(self):
            self.seen = 90 * MIB

        def enforce(self, *, waits):
            process.held["weights"] = 0

    weights = Weights()
    process.held = {"weights": 90 * MIB, "contexts": 0}
    process_memory.add_limit(weights)
    memory.set_budget("110 MiB")
    assert process_memory.budget() == 110 * MIB

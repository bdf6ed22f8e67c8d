"""The level that drafts as memory: what it saves, and what it does with less."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

from llmaas_hooks import MemoryClaim
from llmaas_plugins.elastic.draft_worth import Phase
from llmaas_plugins.elastic.drafting import LevelDrafter
from llmaas_plugins.elastic.level_drafts import LevelDrafts
from llmaas_plugins.memory.division import STEP, divide
from llmaas_plugins.memory.recent import TIME_S

MIB = 1 << 20
ALONE_S = 0.1
BYTE_S = 1e-6 / 1024
N_MEASURED, N_RESTED = 6, 256


class Weights:
    """Weights of 100 MiB, whose two narrow levels take 31 and 21 MiB; each MiB is waited for."""

    def __init__(self, room=40, scale=1):
        self.room, self.n_bytes = room * scale * MIB, 100 * scale * MIB
        self.sizes = (0, 31 * scale * MIB, 21 * scale * MIB)
        self.kept, self.stalled_ns = "another's", 0

    def keep_level(self, level):
        self.kept = level

    def pass_through(self):
        """Wait a microsecond for each KiB that memory does not keep."""
        self.stalled_ns += (self.n_bytes - self.room >> 10) * 1000

    def stats(self):
        return {
            "room_bytes": self.room,
            "level_bytes": self.sizes[self.kept or 0],
            "bytes": self.n_bytes,
            "kept_bytes": self.room,
            "stalled_ns": self.stalled_ns,
        }


class BusyWeights(Weights):
    """Weights whose figures wait for the batch of another context."""

    def __init__(self):
        super().__init__()
        self.is_asked, self.is_over = threading.Event(), threading.Event()

    def stats(self):
        self.is_asked.set()
        assert self.is_over.wait(60)
        return super().stats()


def passed(drafts, weights):
    weights.pass_through()
    drafts.memory.passed()


def measured(drafts, weights):
    """Begin a request, and say tokens without drafts until drafts begin; return how many."""
    drafts.begin()
    return undrafted(drafts, weights)


def undrafted(drafts, weights):
    """Say tokens without drafts until drafts begin; return how many it took."""
    n = 0
    while drafts.worth.phase is not Phase.DRAFTING:
        assert drafts.prepare(weights) is None
        passed(drafts, weights)
        drafts.passed(weights, 1, {1: ALONE_S})
        n += 1
        assert n < 1000
    return n


def drafted(drafts, weights, n, gain):
    """Make up to ``n`` drafts that give two tokens in the time of ``2 / gain`` others."""
    for _ in range(n):
        level = drafts.prepare(weights)
        if level is None:
            return
        passed(drafts, weights)
        drafts.drafted(level, 1, [0.9], 2 * ALONE_S / gain)


@pytest.fixture
def weights():
    return Weights()


@pytest.fixture
def drafts(weights):
    made = LevelDrafts((1.0, 0.3, 0.2))
    assert measured(made, weights) == N_MEASURED
    return made


def test_a_level_left_by_an_earlier_context_is_not_kept_first(weights):
    LevelDrafts((1.0, 0.3, 0.2)).prepare(weights)
    assert weights.kept is None


def test_the_level_saves_its_drafts_gain_and_the_waits_for_its_bytes(drafts, weights):
    assert drafts.memory.claim() is None
    drafted(drafts, weights, 100, 1.25)  # equally fast at both levels: the wider one stays
    assert (drafts.worth.level, weights.kept) == (1, 1)
    claim = drafts.memory.claim()
    most = 32 * MIB  # whole steps of the division
    assert (claim.held, claim.most, claim.taken) == (most, most, 31 * MIB)
    each_s = ALONE_S * (1 - 1 / 1.25) + 31 * MIB * BYTE_S
    (_, (before, nothing), (size, saved_s)) = claim.saved
    assert (before, nothing, size) == (most - 1, 0.0, most)
    assert saved_s == pytest.approx((N_MEASURED + 200) * each_s / TIME_S, rel=0.05)


def test_a_level_that_is_tried_saves_what_other_weights_would(drafts, weights):
    drafted(drafts, weights, 10, 1.25)
    claim = drafts.memory.claim()
    nothing, (most, saved_s) = claim.saved
    assert (claim.held, nothing, most) == (32 * MIB, (0, 0.0), 32 * MIB)
    assert saved_s == pytest.approx((N_MEASURED + 20) * 31 * MIB * BYTE_S / TIME_S, rel=0.05)
    for _ in range(8):  # batches of a prompt, which level or other weights spare the same waits
        passed(drafts, weights)
    before_s, saved_s = saved_s, drafts.memory.claim().saved[-1][1]
    assert saved_s - before_s == pytest.approx(8 * 31 * MIB * BYTE_S / TIME_S, rel=0.2)
    for contexts_s, expected in ((saved_s / 2, 32), (saved_s * 2, 0)):  # the request may be over
        contexts = MemoryClaim("contexts", 0, 32 * MIB, ((0, 0.0), (32 * MIB, contexts_s)), print)
        assert divide(32 * MIB, [drafts.memory.claim(), contexts])[0] == expected * MIB


@pytest.mark.parametrize("n", [10, 100])
def test_a_level_is_given_back_if_nothing_was_said_for_a_day(drafts, weights, monkeypatch, n):
    drafted(drafts, weights, n, 1.25)
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 24 * 3600)
    contexts = MemoryClaim("contexts", 0, 32 * MIB, ((0, 0.0), (32 * MIB, 0.01)), print)
    assert divide(32 * MIB, [drafts.memory.claim(), contexts]) == [0, 32 * MIB]


@pytest.mark.parametrize(
    ("room", "gain", "n"),
    [
        (40, 1.2, N_MEASURED),  # after 2,048 drafts, tokens without them are timed again
        (40, 0.9, N_RESTED + N_MEASURED),
        (10, None, N_RESTED + N_MEASURED),  # no level fits
    ],
)
def test_waits_are_those_of_tokens_that_are_timed_without_drafts(room, gain, n):
    drafts, weights = LevelDrafts((1.0, 0.3, 0.2)), Weights(room)
    measured(drafts, weights)
    drafted(drafts, weights, 3000, gain)
    assert undrafted(drafts, weights) == n
    assert drafts._waits.byte_s == pytest.approx(BYTE_S)


def test_drafts_that_do_not_pay_claim_nothing(drafts, weights):
    drafted(drafts, weights, 100, 0.9)
    assert drafts.worth.phase is Phase.RESTING
    assert drafts.memory.claim() is None
    assert drafts.prepare(weights) is weights.kept is None


def test_less_memory_gives_a_narrower_level_or_none(drafts, weights):
    drafted(drafts, weights, 100, 1.25)
    claim = drafts.memory.claim()
    claim.resize(30 * MIB)
    drafted(drafts, weights, 100, 1.2)
    assert weights.kept == 2
    claim = drafts.memory.claim()
    assert (claim.held, claim.most) == (22 * MIB, 22 * MIB)
    claim.resize(0)
    assert drafts.prepare(weights) is None
    assert drafts.obstacle == "the narrowest level takes 21 MiB, but 0 MiB of weights may be kept"
    claim = drafts.memory.claim()  # it would still pay, so it may get memory back
    assert (claim.held, claim.taken, claim.most) == (0, 0, 22 * MIB)
    assert claim.saved[-1][1] > 0
    claim.resize(22 * MIB)
    assert drafts.memory.claim().held == 22 * MIB
    assert measured(drafts, weights) == N_MEASURED
    drafted(drafts, weights, 100, 1.2)
    assert weights.kept == 2


@pytest.mark.parametrize(("contexts_s", "expected"), [(0.1, 32), (4.0, 0)])
def test_the_division_gives_memory_to_the_level_as_a_whole_or_not_at_all(
    drafts, weights, contexts_s, expected
):
    drafted(drafts, weights, 100, 1.25)
    contexts = MemoryClaim("contexts", 0, 40 * MIB, ((0, 0.0), (40 * MIB, contexts_s)), print)
    level, others = divide(40 * MIB, [drafts.memory.claim(), contexts])
    assert (level, level + others) == (expected * MIB, 40 * MIB)
    assert level % STEP == 0


def test_a_level_of_hundreds_of_mib_gets_its_memory_back():
    weights = Weights(scale=10)  # 310 MiB are 155 steps of the division
    drafts = LevelDrafts((1.0, 0.3, 0.2))
    measured(drafts, weights)
    drafted(drafts, weights, 100, 1.25)
    drafts.memory.claim().resize(0)
    drafted(drafts, weights, 1, 1.25)
    assert (drafts.prepare(weights), weights.kept) == (None, None)
    claim = drafts.memory.claim()
    assert (claim.held, claim.most) == (0, 310 * MIB)
    claim.resize(claim.most)
    measured(drafts, weights)
    drafted(drafts, weights, 1, 1.25)
    assert weights.kept == 1


def test_a_level_that_lost_its_memory_before_it_paid_is_tried_again(drafts, weights):
    drafted(drafts, weights, 10, 1.25)
    drafts.memory.claim().resize(0)
    assert drafts.prepare(weights) is None
    assert drafts.memory.claim() is None
    assert undrafted(drafts, weights) == N_RESTED + N_MEASURED
    drafted(drafts, weights, 100, 1.25)
    assert weights.kept == 1


def test_memory_is_divided_while_a_context_waits_for_the_batch_of_another():
    drafts, weights = LevelDrafts((1.0, 0.3, 0.2)), BusyWeights()
    weights.is_over.set()
    measured(drafts, weights)
    drafted(drafts, weights, 10, 1.25)
    native = SimpleNamespace(file_weights=lambda: weights, level=0, sparse_tokens=False)
    drafter = LevelDrafter(SimpleNamespace(native=native), drafts, print)
    weights.is_asked.clear()
    weights.is_over.clear()
    with ThreadPoolExecutor(2) as threads:
        try:
            proposal = threads.submit(drafter.propose, np.arange(3), {1: ALONE_S})
            assert weights.is_asked.wait(60)
            claim = threads.submit(drafts.memory.claim).result(5)
            threads.submit(claim.resize, 0).result(5)
            assert not proposal.done()
        finally:
            weights.is_over.set()
        assert proposal.result(60) is not None  # its level was chosen before
    assert drafts.prepare(weights) is None

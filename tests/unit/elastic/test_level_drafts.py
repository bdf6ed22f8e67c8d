"""The level that drafts as memory: what it saves, and what it does with less."""

from __future__ import annotations

import pytest

from llmaas_hooks import MemoryClaim
from llmaas_plugins.elastic.draft_worth import Phase
from llmaas_plugins.elastic.level_drafts import LevelDrafts
from llmaas_plugins.memory.division import STEP, divide
from llmaas_plugins.memory.recent import TIME_S

MIB = 1 << 20
ALONE_S = 0.1
N_MEASURED = 6


class Weights:
    """Weights of 100 MiB, whose two narrow levels take 31 and 21 MiB; each MiB is waited for."""

    sizes = (0, 31 * MIB, 21 * MIB)

    def __init__(self, room=40):
        self.room, self.kept, self.stalled_ns = room * MIB, "another's", 0

    def keep_level(self, level):
        self.kept = level

    def pass_through(self):
        """Wait a microsecond for each KiB that memory does not keep."""
        self.stalled_ns += (100 * MIB - self.room >> 10) * 1000

    def stats(self):
        return {
            "room_bytes": self.room,
            "level_bytes": self.sizes[self.kept or 0],
            "bytes": 100 * MIB,
            "kept_bytes": self.room,
            "stalled_ns": self.stalled_ns,
        }


def measured(drafts, weights):
    """Say tokens without drafts until drafts begin; return how many it took."""
    drafts.begin()
    n = 0
    while drafts.worth.phase is not Phase.DRAFTING:
        assert drafts.prepare(weights) is None
        weights.pass_through()
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
    assert drafts.claim() is None
    drafted(drafts, weights, 100, 1.25)  # equally fast at both levels: the wider one stays
    assert (drafts.worth.level, weights.kept) == (1, 1)
    claim = drafts.claim()
    most = 32 * MIB  # whole steps of the division
    assert (claim.held, claim.most, claim.taken) == (most, most, 31 * MIB)
    each_s = ALONE_S * (1 - 1 / 1.25) + 31 * 1024e-6
    (_, (before, nothing), (size, saved_s)) = claim.saved
    assert (before, nothing, size) == (most - 1, 0.0, most)
    assert saved_s == pytest.approx((N_MEASURED + 200) * each_s / TIME_S, rel=0.05)


def test_nothing_is_known_of_a_level_that_is_tried(drafts, weights):
    drafted(drafts, weights, 10, 1.25)
    assert (drafts.claim().held, drafts.claim().saved) == (32 * MIB, ())


def test_drafts_that_do_not_pay_claim_nothing(drafts, weights):
    drafted(drafts, weights, 100, 0.9)
    assert drafts.worth.phase is Phase.RESTING
    assert drafts.claim() is None
    assert drafts.prepare(weights) is weights.kept is None


def test_less_memory_gives_a_narrower_level_or_none(drafts, weights):
    drafted(drafts, weights, 100, 1.25)
    claim = drafts.claim()
    claim.resize(30 * MIB)
    drafted(drafts, weights, 100, 1.2)
    assert weights.kept == 2
    claim = drafts.claim()
    assert (claim.held, claim.most) == (22 * MIB, 22 * MIB)
    claim.resize(0)
    assert drafts.prepare(weights) is None
    assert drafts.obstacle == "the narrowest level takes 21 MiB, but 0 MiB of weights may be kept"
    claim = drafts.claim()  # it would still pay, so it may get memory back
    assert (claim.held, claim.taken, claim.most) == (0, 0, 22 * MIB)
    assert claim.saved[-1][1] > 0
    claim.resize(22 * MIB)
    assert drafts.claim().held == 22 * MIB
    assert measured(drafts, weights) == N_MEASURED
    drafted(drafts, weights, 100, 1.2)
    assert weights.kept == 2


@pytest.mark.parametrize(("contexts_s", "expected"), [(0.1, 32), (4.0, 0)])
def test_the_division_gives_memory_to_the_level_as_a_whole_or_not_at_all(
    drafts, weights, contexts_s, expected
):
    drafted(drafts, weights, 100, 1.25)
    contexts = MemoryClaim("contexts", 0, 40 * MIB, ((0, 0.0), (40 * MIB, contexts_s)), print)
    level, others = divide(40 * MIB, [drafts.claim(), contexts])
    assert (level, level + others) == (expected * MIB, 40 * MIB)
    assert level % STEP == 0

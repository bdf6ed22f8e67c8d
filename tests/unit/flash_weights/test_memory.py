"""The division of one memory budget among streamed models."""

from __future__ import annotations

import re
from types import SimpleNamespace

import numpy as np
import pytest

from llmaas_hooks import BudgetError, ConfigError
from llmaas_plugins import process_memory
from llmaas_plugins.flash_weights import residency
from llmaas_plugins.flash_weights.config import FlashWeightsConfig
from llmaas_plugins.flash_weights.memory import Needs, needed_by, shares
from llmaas_plugins.flash_weights.plugin import FlashWeights
from llmaas_plugins.process_memory import SPARE_BYTES

MIB = 1 << 20


def needs(n_bytes, least=0, passing=8, growth=0):
    return Needs(n_bytes * MIB, least * MIB, passing * MIB, growth * MIB)


def shared(budget, others, *models):
    """Return the MiB of each model's weights and growth, of a budget beside the spare."""
    return [n // MIB for n in shares(budget * MIB + SPARE_BYTES, others * MIB, models)]


def test_the_budget_is_set_as_in_the_configuration():
    flash = FlashWeights(FlashWeightsConfig())
    for budget in (2 << 30, "2 GiB"):
        flash.set_memory_budget(budget)
        assert flash.llmaas_status()["memory_budget"] == 2 << 30
    with pytest.raises(ConfigError, match=r"expected a size such as 3 GiB.*, found '2 Gi'$"):
        flash.set_memory_budget("2 Gi")
    assert flash.llmaas_status()["memory_budget"] == 2 << 30


def test_by_size():
    assert shared(216, 100, needs(300), needs(100)) == [75, 25]
    assert shared(216, 100, needs(100), needs(300)) == [25, 75]


def test_none_gets_more_than_it_has():
    assert shared(2000, 100, needs(300), needs(100)) == [300, 100]
    assert shared(100, 100) == []


def test_what_one_cannot_use_is_for_the_others():
    small, large = shared(400, 100, needs(10, growth=30), needs(400))
    assert small == 30  # its batches need more than it has
    assert large == 400 - 100 - 16 - 30


def test_growth_takes_no_weights_if_there_is_memory_for_both():
    assert shared(2000, 100, needs(300, growth=20), needs(100)) == [320, 100]
    models = [Needs(100 * MIB, 0, 8 * MIB, 20 * MIB, 60 * MIB)]
    assert shared(2000, 100, *models) == [180]


def test_experts_and_batches_have_room_in_any_case():
    found = shared(166, 100, needs(1000, least=10, growth=20), needs(1000))
    assert found[0] >= 30
    assert sum(found) <= 50


def test_a_budget_that_cannot_be_met_is_refused_with_the_least():
    models = needs(1000, least=10, growth=20), needs(1000)
    assert needed_by(models) == (16 + 30) * MIB
    least = 100 * MIB + needed_by(models) + SPARE_BYTES
    assert [n // MIB for n in shares(least, 100 * MIB, models)] == [30, 0]
    with pytest.raises(BudgetError) as caught:
        shares(least - 1, 100 * MIB, models)
    named = int(re.search(r"expected (\d+) MiB", str(caught.value))[1]) * MIB
    assert least <= named <= least + 4 * MIB  # a little more, so that it works in every run
    assert "\n" not in str(caught.value)


def test_weights_that_only_prompts_use_get_what_all_others_leave():
    models = [
        Needs(100 * MIB, 0, 8 * MIB, 0, 60 * MIB),
        needs(200),
        Needs(50 * MIB, 0, 0, 0, 30 * MIB),
    ]
    least = 350 + 8 + 8  # what tokens of all three use, and what passes through
    for budget, expected in (
        (least - 50, [85, 171, 42]),
        (least, [100, 200, 50]),
        (least + 45, [130, 200, 65]),
        (least + 200, [160, 200, 80]),
    ):
        assert shared(budget, 0, *models) == pytest.approx(expected, abs=1)


def test_the_budget_holds_whatever_the_models_are():
    rng = np.random.default_rng(3)
    for _ in range(300):
        models = [
            Needs(*(int(n) for n in rng.integers(0, 1 << 30, 5) >> rng.integers(0, 20, 5)))
            for _ in range(rng.integers(1, 5))
        ]
        others = int(rng.integers(1 << 28))
        least = others + needed_by(models) + SPARE_BYTES
        budget = least + int(rng.integers(0, 1 << 31))
        found = shares(budget, others, models)
        room = budget - others - SPARE_BYTES - sum(one.passing for one in models)
        assert sum(found) <= room
        for kept, one in zip(found, models, strict=True):
            least, most = sorted((one.least, one.n_bytes))
            assert least + one.growth <= kept <= most + one.growth + one.prompts


class Weights:
    """Weights of 100 MiB that are kept once a batch has read them."""

    def __init__(self):
        self.wanted = self.kept = self.arena = 0

    def set_memory(self, kept, arena, waits=True):
        self.wanted, self.arena = kept, arena
        self.kept = min(self.kept, kept)
        return True

    def stats(self):
        figures = {"bytes": 100 * MIB, "kept_bytes": self.kept, "arena_bytes": 0}
        unused = "passing_bytes", "least_bytes", "stalled_ns", "prompt_bytes", "prompt_kept_bytes"
        return figures | dict.fromkeys((*unused, "passes", "prompt_used_bytes"), 0)


class Context:
    """New context of a streamed model; each number is its address."""

    model, ctx = 1, 2

    def __init__(self, weights):
        self.weights = weights

    def file_weights(self):
        return self.weights

    def cells(self):
        return SimpleNamespace(n=0)

    def untouched_bytes(self):
        return 0


def test_memory_that_the_app_takes_after_a_stopped_first_batch_is_the_apps(monkeypatch):
    monkeypatch.setattr(process_memory, "_limits", set())
    monkeypatch.setattr(process_memory, "_users", set())
    process = 40 * MIB
    for module in (process_memory, residency):
        monkeypatch.setattr(module, "resident_bytes", lambda: process)
    found = residency.Residency(400 * MIB, arena=8 * MIB)
    found.add(Context(Weights()), growth=30 * MIB, beside=20 * MIB)
    room = found.room()
    found.begin(Context.ctx)
    process += 10 * MIB
    assert found.room() == room
    found.end(Context.ctx)  # Ctrl-C, before the batch was counted
    process += 25 * MIB
    assert found.room() == room - 35 * MIB


def test_what_a_first_batch_takes_is_counted_once(monkeypatch):
    monkeypatch.setattr(process_memory, "_limits", set())
    monkeypatch.setattr(process_memory, "_users", set())
    process = 40 * MIB
    for module in (process_memory, residency):
        monkeypatch.setattr(module, "resident_bytes", lambda: process)
    found = residency.Residency(400 * MIB, arena=8 * MIB)
    weights = Weights()
    found.add(Context(weights), growth=30 * MIB, beside=20 * MIB)
    room = found.room()
    process += 5 * MIB  # the app's own, before its request
    assert found.room() == room - 5 * MIB
    found.begin(Context.ctx)
    for _ in range(5):  # the batch fills its buffers, and reads weights that are then kept
        process += 25 * MIB
        assert found.room() == room - 5 * MIB
    process += 100 * MIB  # more than it may
    assert found.room() <= room - 5 * MIB - 60 * MIB
    process -= 100 * MIB
    weights.kept = weights.wanted
    found.decoded(Context.ctx, 1)
    assert found.room() == room - 5 * MIB + (30 + 20) * MIB - (5 * 25 - 100) * MIB

"""Kept weights are worth the waits for the others."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from llmaas_plugins.flash_weights.savings import Seen, WeightSavings
from llmaas_plugins.flash_weights.streamed_model import StreamedModel
from llmaas_plugins.memory.recent import TIME_S

MIB = 1 << 20


@pytest.fixture
def savings(monkeypatch):
    monkeypatch.setattr("llmaas_plugins.memory.recent.time.monotonic", lambda: 1.0)
    return WeightSavings()


def sizes(n_bytes, kept, prompts=0, prompts_kept=0):
    names = "bytes", "kept_bytes", "prompt_bytes", "prompt_kept_bytes"
    return dict(zip(names, (n_bytes, kept, prompts, prompts_kept), strict=True))


def test_a_byte_saves_its_wait_in_each_pass(savings):
    savings.saw(
        Seen(0, 0), Seen(3_000_000_000, 10), sizes(400 * MIB, 100 * MIB)
    )  # 1 ms a MiB and pass
    assert savings.saved_s(400 * MIB) * MIB == pytest.approx(10 * 0.001 / TIME_S)


def test_where_computing_takes_longer_than_reading_nothing_is_saved(savings):
    savings.saw(Seen(5, 2), Seen(5, 12), sizes(400 * MIB, 300 * MIB))
    assert savings.saved_s(400 * MIB) == 0


def test_weights_that_are_all_kept_are_worth_what_they_were(savings):
    savings.saw(Seen(0, 0), Seen(3_000_000_000, 10), sizes(400 * MIB, 100 * MIB))
    before = savings.saved_s(400 * MIB)
    savings.saw(Seen(0, 0), Seen(0, 0), sizes(400 * MIB, 400 * MIB))  # no batch: nothing is known
    assert savings.saved_s(400 * MIB) == before
    kept = WeightSavings()
    kept.saw(Seen(0, 0), Seen(0, 10), sizes(400 * MIB, 400 * MIB))
    assert kept.saved_s(400 * MIB) == pytest.approx(10 * 1e-9 / TIME_S)  # a guess, no division by 0


def test_two_models_share_the_passes_by_their_size(savings):
    savings.saw(Seen(0, 0), Seen(1_000_000_000, 10), sizes(100 * MIB, 0))
    savings.saw(Seen(0, 0), Seen(0, 0), sizes(300 * MIB, 0))
    each = 1.0 / (10 * 100 * MIB)
    assert savings.saved_s(400 * MIB) == pytest.approx(each * 10 * 100 / 400 / TIME_S)


def test_weights_that_only_prompts_use_save_less_and_come_last(savings):
    """The waits are for 300 MiB in each of 10 passes, and for 200 MiB in two of them."""
    found = sizes(400 * MIB, 100 * MIB, 250 * MIB, 50 * MIB)
    savings.saw(Seen(0, 0, 0), Seen(3_400_000_000, 10, 2 * 250 * MIB), found)
    weights, *_ = savings.claims(
        [SEEN | found | {"level_bytes": 0, "level_kept_bytes": 0}], 0, print
    )
    each = 0.001 / TIME_S  # of a MiB and pass
    assert weights.held == (100 - 10 + 50) * MIB
    assert weights.most == (400 - 10 + 250) * MIB
    nothing, tokens, prompts = weights.saved
    assert nothing == (0, 0.0)
    assert tokens == (390 * MIB, pytest.approx(390 * 10 * each))
    assert prompts == (640 * MIB, pytest.approx((390 * 10 + 250 * 2) * each))


def test_narrow_tokens_count_for_the_weights_of_prompts_by_what_they_use(savings):
    """Two of 10 passes are prompts, and 8 are tokens at 20 %."""
    found = sizes(400 * MIB, 100 * MIB, 250 * MIB, 50 * MIB)
    used = (2 + 8 / 5) * 250 * MIB
    waits_s = 0.001 * (10 * 300 + (2 + 8 / 5) * 200)
    savings.saw(Seen(0, 0, 0), Seen(int(waits_s * 1e9), 10, int(used)), found)
    each = 0.001 / TIME_S
    assert savings.saved_s(400 * MIB) * MIB == pytest.approx(10 * each)
    saved = savings.prompt_saved_s(400 * MIB, 250 * MIB)
    assert saved * MIB == pytest.approx((2 + 8 / 5) * each)


def test_room_of_compute_buffers_is_no_part_of_the_division(savings):
    seen = dict.fromkeys(SEEN, 0)
    seen |= {"bytes": 400 * MIB, "kept_bytes": 150 * MIB, "arena_bytes": 5 * MIB}
    weights, needed, lent = savings.claims([seen], 60 * MIB, print)
    assert (weights.held, weights.most) == (90 * MIB, 340 * MIB)
    assert (needed.held, lent.held) == (5 * MIB, 60 * MIB)
    weights, needed, lent = savings.claims([seen], 200 * MIB, print)
    assert (weights.held, weights.most) == (0, 200 * MIB)
    assert (needed.held, lent.held) == (5 * MIB, 150 * MIB)


SEEN = {
    "bytes": 400 * MIB,
    "kept_bytes": 150 * MIB,
    "least_bytes": 10 * MIB,
    "level_bytes": 80 * MIB,
    "level_kept_bytes": 60 * MIB,
    "arena_bytes": 5 * MIB,
    "passing_bytes": 0,
    "prompt_bytes": 0,
    "prompt_kept_bytes": 0,
}


def test_before_the_first_pass_nothing_is_known_and_without_waits_nothing_is_saved(savings):
    assert not savings.claims([SEEN], 0, print)[0].is_known
    savings.saw(Seen(5, 0), Seen(5, 10), sizes(400 * MIB, 150 * MIB))
    assert savings.claims([SEEN], 0, print)[0].saved == ((0, 0.0), (310 * MIB, 0.0))


def test_a_level_that_is_kept_first_is_no_part_of_the_claim(savings):
    weights, needed, _ = savings.claims([SEEN], 0, print)
    assert (weights.held, weights.most) == (80 * MIB, 310 * MIB)
    assert needed.held == 15 * MIB  # all together 95, beside the 60 of the level


@pytest.fixture
def streamed(savings):
    """Return a streamed model whose figures the test sets."""
    stats = SEEN | {"stalled_ns": 0, "passes": 0, "prompt_used_bytes": 0}
    context = SimpleNamespace(
        file_weights=lambda: SimpleNamespace(stats=stats.copy),
        cells=lambda: SimpleNamespace(n=0),
        untouched_bytes=lambda: 0,
    )
    return StreamedModel(savings, {1: context}), stats


def test_waits_in_contexts_of_plugins_make_no_pass_of_the_app_worth_more(
    streamed, savings, monkeypatch
):
    """As where a plugin scores the words of prompts."""
    model, stats = streamed
    model.look()
    model.n_batches = 10  # of the app
    stats |= {"stalled_ns": 4_000_000_000, "passes": 40}
    model.look()
    assert savings.saved_s(400 * MIB) * MIB == pytest.approx(4 / 250 / TIME_S)
    later = 1.0 + 20 * TIME_S  # when nothing of that counts any more
    monkeypatch.setattr("llmaas_plugins.memory.recent.time.monotonic", lambda: later)
    model.n_batches += 10
    stats |= {"passes": 50, "kept_bytes": 400 * MIB}  # nothing waits, so the wait is remembered
    model.look()
    assert savings.saved_s(400 * MIB) * MIB == pytest.approx(10 * 4 / 40 / 250 / TIME_S)


def test_what_a_model_did_in_earlier_contexts_is_not_counted_again(streamed, savings):
    model, stats = streamed
    stats |= {"stalled_ns": 4_000_000_000, "passes": 40}
    model.look()
    assert not savings.claims([SEEN], 0, print)[0].is_known

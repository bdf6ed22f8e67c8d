"""The evaluation of elastic models: divergences, paired intervals, and equal bytes."""

from __future__ import annotations

import math

import numpy as np
import pytest

from llmaas_eval.elastic.methods import rows_of_layers
from llmaas_eval.elastic.readings import (
    Reading,
    mean_reading,
    mixed,
    perplexity,
    perplexity_ratio,
    read_window,
)
from llmaas_eval.elastic.report import report
from llmaas_eval.elastic.rows import FULL, Row, as_json
from llmaas_eval.elastic.sizes import kept_layers
from llmaas_eval.stats import mean_interval
from llmaas_plugins.elastic.units import Blocks, all_units, without_layers
from llmaas_plugins.model.forward import log_softmax


def reading(nats, kl=0.0, same=1.0):
    nats = np.array(nats, float)
    return Reading(nats, np.full(len(nats), kl), np.full(len(nats), same))


def blocks(n_layers=8, key_value_bytes=0.0):
    """Return blocks with a third of the bytes in groups and the rest in neurons."""
    return Blocks(
        arch="llama",
        n_layers=n_layers,
        n_groups=4,
        heads_per_group=2,
        head_dim=8,
        n_embd=64,
        n_ff=100,
        group_granule=1,
        granule=1,
        group_bytes=(100.0,) * n_layers,
        neuron_bytes=(8.0,) * n_layers,
        key_value_bytes=(key_value_bytes,) * n_layers,
        cuts_keys_values=False,
    )


def test_probabilities_are_those_of_the_logits():
    found = np.exp(log_softmax(np.log(np.array([[1, 2, 1], [3e-9, 1e-9, 0.6e-8]], np.float32))))
    np.testing.assert_allclose(found, [[0.25, 0.5, 0.25], [0.3, 0.1, 0.6]], rtol=1e-6)
    assert np.isfinite(log_softmax(np.array([[1e4, -1e4]], np.float32))).all()


def test_a_window_as_computed_by_hand():
    full = np.log(np.array([[0.5, 0.5], [0.9, 0.1]], np.float32))
    found = np.log(np.array([[0.25, 0.75], [0.9, 0.1]], np.float32))
    nats, kl, same = read_window(full, found, np.array([0, 1]))
    assert nats == pytest.approx((math.log(4) + math.log(10)) / 2)
    assert kl == pytest.approx((0.5 * math.log(2) + 0.5 * math.log(2 / 3)) / 2, rel=1e-5)
    assert same == 0.5
    assert read_window(full, full, np.array([0, 1]))[1:] == (0, 1)


def test_perplexity_is_of_all_tokens_and_its_ratio_paired():
    base, found = reading([1.0, 3.0]), reading([1.1, 3.1])
    assert perplexity(base) == pytest.approx(math.exp(2))
    ratio = perplexity_ratio(found, base)
    assert ratio == pytest.approx((math.exp(0.1),) * 3)  # windows differ, the change does not


def test_intervals_of_means_have_the_right_size():
    rng = np.random.default_rng(1)
    apart = rng.normal(0.3, 1.0, 400)
    value, low, high = mean_interval(apart)
    assert value == pytest.approx(apart.mean())
    half = 1.96 * apart.std() / math.sqrt(400)
    assert value - low == pytest.approx(half, rel=0.1)
    assert high - value == pytest.approx(half, rel=0.1)


def test_readings_of_seeds_and_between_two():
    a, b = reading([1.0, 2.0], kl=0.2, same=0.5), reading([3.0, 4.0], kl=0.6, same=0.9)
    assert mean_reading([a, b]).nats.tolist() == [2, 3]
    between = mixed(a, b, 0.25)
    assert between.nats.tolist() == [1.5, 2.5]
    assert between.kl == pytest.approx([0.3, 0.3])
    assert between.same == pytest.approx([0.6, 0.6])


def test_removed_layers_use_nothing():
    one = blocks(2)
    assert one.share(all_units(one)) == 1
    assert one.share(without_layers(one, [1])) == 0.5
    assert without_layers(one, [1]).groups.tolist() == [4, 0]


@pytest.mark.parametrize(
    ("key_value_bytes", "level", "n", "share"),
    [
        (0, 1.0, 8, 1.0),
        (0, 0.5, 4, 1.0),
        (0, 0.55, 5, 0.4),
        (300, 0.5, 6, 1.0),  # K and V projections as large as all the rest: removed ones count
        (300, 0.2, 5, 0.8),
    ],
)
def test_layers_for_as_many_bytes(key_value_bytes, level, n, share):
    found = kept_layers(blocks(key_value_bytes=key_value_bytes), level)
    assert found.n == n
    assert found.share == pytest.approx(share)


def test_whole_layers_get_the_next_larger_number_of_bytes():
    by_kept = {n: reading([float(n)], kl=float(n)) for n in range(1, 9)}
    found = {
        (row.method, row.level): row
        for row in rows_of_layers("x", blocks(), (0.55, 0.5, 0.1), by_kept)
    }
    assert found["x", 0.55].reading.kl == 5
    assert found["x", 0.55].share == 5 / 8
    assert found["x, interpolated", 0.55].reading.kl == pytest.approx(4.4)
    assert found["x, interpolated", 0.55].share == pytest.approx(0.55)
    assert found["x", 0.5].reading.kl == found["x, interpolated", 0.5].reading.kl == 4
    assert found["x", 0.1].reading.kl == 1
    assert ("x, interpolated", 0.1) not in found


def test_changed_levels_are_shown_beside_one_level_throughout():
    nats = {(1.0, 1.0): 1.0, (1.0, 0.5): 1.5, (0.5, 1.0): 1.1, (0.5, 0.5): 1.6}
    rows = [Row(f"from {a:.0%}", b, b, reading([x, x])) for (a, b), x in nats.items()]
    parts = dict.fromkeys(("levels", "layers", "calibration", "types"), ())
    rows = [Row(FULL, 1.0, 1.0, reading([9.0])), *rows]
    shown = report(as_json({**parts, "continued": rows}))
    ratio = {x: f"{math.exp(x):.4f}" for x in (0.0, 0.1, 0.5, 0.6, -0.1, -0.5)}
    assert f"| first 100 % | {ratio[0.0]} | {ratio[0.5]} |" in shown
    assert f"| 50 % | {ratio[0.1]} | {ratio[0.6]} |" in shown
    (line,) = [line for line in shown.splitlines() if line.startswith("| from 50% to 100% |")]
    assert f"| {ratio[-0.5]} (" in line
    assert f"| {ratio[0.1]} (" in line

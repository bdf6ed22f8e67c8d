"""Widths of uniform levels for models of any shape, by the paper's rule whatever the step sizes."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmaas_plugins.elastic.uniform import LEVELS, anchors_of, step_of, uniform_widths
from llmaas_plugins.elastic.units import Blocks


@st.composite
def models(draw):
    n_layers, granule = draw(st.integers(1, 12)), draw(st.sampled_from([1, 32, 256]))
    n_groups = draw(st.sampled_from([1, 2, 3, 8]))
    group_granule = draw(st.sampled_from([n for n in (1, 2, 3, 8) if n_groups % n == 0]))
    n_ff = granule * draw(st.integers(1, 3000 // granule + 1))
    weigh = st.floats(0.5, 4)
    blocks = Blocks(
        arch="llama",
        n_layers=n_layers,
        n_groups=n_groups,
        heads_per_group=2,
        head_dim=32,
        n_embd=256,
        n_ff=n_ff,
        group_granule=group_granule,
        granule=granule,
        group_bytes=tuple(1e5 * draw(weigh) for _ in range(n_layers)),
        neuron_bytes=tuple(1e3 * draw(weigh) for _ in range(n_layers)),
        key_value_bytes=(1e5,) * n_layers,
        cuts_keys_values=False,
    )
    losses = [draw(st.floats(-1, 5)) for _ in range(n_layers)]
    return blocks, np.array(losses, np.float64)


@given(models())
def test_widths_are_nested_possible_and_as_large_as_steps_allow(model):
    blocks, losses = model
    step = step_of(blocks)
    found = uniform_widths(blocks, LEVELS, losses, step)
    assert blocks.share(found[0]) == pytest.approx(1)
    floors = min(blocks.group_granule, blocks.n_groups), min(step, blocks.n_ff)
    largest = max(
        max(blocks.group_bytes) * blocks.group_granule, max(blocks.neuron_bytes) * step
    ) / (sum(blocks.group_bytes) * blocks.n_groups + sum(blocks.neuron_bytes) * blocks.n_ff)
    for i, (level, widths) in enumerate(zip(LEVELS, found, strict=True)):
        for of, n, unit, floor in (
            (widths.groups, blocks.n_groups, blocks.group_granule, floors[0]),
            (widths.neurons, blocks.n_ff, step, floors[1]),
        ):
            assert ((of % unit == 0) | (of == n)).all()
            assert (floor <= of).all()
            assert (of <= n).all()
        if i:
            assert (widths.groups <= found[i - 1].groups).all()
            assert (widths.neurons <= found[i - 1].neurons).all()
        is_least = (widths.groups == floors[0]).all() and (widths.neurons == floors[1]).all()
        assert blocks.share(widths) <= level + 1e-6 or is_least
        assert blocks.share(widths) > level - largest - 1e-6


@given(models(), st.sampled_from(LEVELS))
def test_anchors_stay_whole_until_others_have_nothing_to_give(model, level):
    blocks, losses = model
    step, anchors = step_of(blocks), set(anchors_of(losses))
    (widths,) = uniform_widths(blocks, [level], losses, step)
    others = [i for i in range(blocks.n_layers) if i not in anchors]
    has_more = any(
        widths.groups[i] > blocks.group_granule or widths.neurons[i] > step for i in others
    )
    are_whole = all(
        (widths.groups[i], widths.neurons[i]) == (blocks.n_groups, blocks.n_ff) for i in anchors
    )
    assert are_whole or not has_more
    assert len(anchors) == round(blocks.n_layers / 5)
    least = min((losses[i] for i in anchors), default=math.inf)
    assert all(losses[i] <= least for i in others)


@given(models(), st.sampled_from(LEVELS))
def test_other_layers_have_one_share(model, level):
    blocks, losses = model
    step, anchors = step_of(blocks), set(anchors_of(losses))
    (widths,) = uniform_widths(blocks, [level], losses, step)
    kept = [
        (of[i] / n, max(unit, 1) / n)
        for i in range(blocks.n_layers)
        if i not in anchors
        for of, n, unit in (
            (widths.groups, blocks.n_groups, blocks.group_granule),
            (widths.neurons, blocks.n_ff, min(step, blocks.n_ff)),
        )
        if of[i] > unit  # a width at its floor has given all it had
    ]
    for share, size in kept:
        for other, other_size in kept:
            assert abs(share - other) <= (size + other_size) / 2 + 1e-9

"""ActiveFlow's equations, computed by hand, and the end of its search."""

from __future__ import annotations

import dataclasses

import pytest

from llmaas_plugins.flash_weights.cost_model import System, pipeline_cost, search_group

SYSTEM = System(
    s_m=800,
    n_layers=8,
    m_max=500,
    m_kv=100,
    si=0.75,
    bw_mem=100,
    bw_flash=lambda n: 10.0 * n,
    hit_rate=lambda share, sp: share,
)


def changed(**fields):
    return dataclasses.replace(SYSTEM, **fields)


def test_the_equations_by_hand():
    cost = pipeline_cost(SYSTEM, 0.5, 2)
    assert cost.m_cl == 100 * 0.5 * 2  # Eq 9
    assert cost.m_cache == 500 - 100 - 100  # Eqs 2 and 8
    assert cost.hr == 300 / 800
    assert cost.t_load == 100 * 0.625 / 10  # Eq 3
    assert cost.t_comp == 100 / 100  # Eq 4
    assert cost.t_onload == 100 * 0.5 * 0.625 * 0.25 / 10  # Eq 6
    assert cost.t_preload == 100 * 0.625 / 20  # Eq 7
    assert cost.t_overlap == cost.t_onload + 3.125  # Eq 5
    assert cost.n_groups == 4
    assert cost.t_decode == 6.25 + 3 * cost.t_overlap + 1  # Eq 1


def test_two_groups_are_the_papers_equation_1():
    cost = pipeline_cost(SYSTEM, 0.5, 4)
    assert cost.t_decode == cost.t_load + cost.t_overlap + cost.t_comp


def test_computing_hides_preloading_or_is_hidden():
    slow = pipeline_cost(changed(bw_mem=1), 0.5, 2)
    assert slow.t_overlap == slow.t_onload + slow.t_comp


@pytest.mark.parametrize(("m_max", "sp"), [(500, 0.375), (800, 0), (900, 0), (200, 0.75)])
def test_the_papers_sparsity(m_max, sp):
    assert changed(m_max=m_max).sp == sp
    assert all(cost.sp == sp for cost in search_group(changed(m_max=m_max)).tried)


def test_more_memory_and_more_of_anything_is_never_slower():
    for name, values in {
        "m_max": range(200, 1200, 50),
        "si": [0, 0.25, 0.5, 1],
        "bw_mem": [1, 10, 100, 1000],
    }.items():
        for n in (1, 2, 4):
            times = [pipeline_cost(changed(**{name: x}), 0.5, n).t_decode for x in values]
            assert times == sorted(times, reverse=True)
            assert times[0] > times[-1]


def test_less_is_computed_with_more_sparsity():
    times = [pipeline_cost(SYSTEM, sp, 2).t_decode for sp in (0, 0.3, 0.6, 0.9)]
    assert times == sorted(times, reverse=True)


def test_it_stops_when_computing_hides_preloading():
    found = search_group(changed(bw_mem=40), 0.5)
    assert [cost.n for cost in found.tried] == [1, 2, 3]
    *before, last = found.tried
    assert all(cost.t_preload > cost.t_comp for cost in before)
    assert last.t_preload <= last.t_comp
    assert found.reason == "computing takes as long as preloading"
    assert search_group(changed(bw_mem=1), 0.5).tried[0].n == 1


def test_it_stops_when_a_layer_more_saves_little():
    flat = changed(bw_mem=1e9, bw_flash=lambda n: min(10.0 * n, 30))
    found = search_group(flat, 0.5)
    assert [cost.n for cost in found.tried] == [1, 2, 3, 4]
    assert found.reason == "one more layer saves little"
    assert len(search_group(flat, 0.5, least=0.4).tried) == 3


def test_it_stops_when_a_group_does_not_fit():
    found = search_group(changed(bw_mem=1e9, m_max=220), 0.5)
    assert [cost.n for cost in found.tried] == [1, 2]
    assert found.reason == "a group of 3 does not fit into the budget"
    none = search_group(changed(m_max=140), 0.5)
    assert none.tried == ()
    assert none.best is None


def test_it_tries_no_more_than_there_are():
    fast = {"bw_mem": 1e9, "m_max": 1e4, "hit_rate": lambda _share, _sp: 0.1}
    assert len(search_group(changed(**fast), 0.5).tried) == 8
    assert len(search_group(changed(**fast, n_layers=3), 0.5).tried) == 3
    found = search_group(changed(**fast), 0.5, most=2)
    assert len(found.tried) == 2
    assert found.reason == "reached the largest group to try"


def test_the_best_is_the_fastest():
    found = search_group(changed(bw_mem=1e9), 0.5)
    assert found.best.t_decode == min(cost.t_decode for cost in found.tried)

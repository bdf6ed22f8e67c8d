"""ActiveFlow's cost model (section 4.1, Table 1, Eqs 1 to 9), and its search for a group's size.

It is of a pipeline that reads the next group of layers while one is computed. The engine does not
read ahead by what other layers chose, so this tells what that would be worth.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["MOST_LAYERS", "Cost", "Search", "System", "pipeline_cost", "search_group"]

MOST_LAYERS = 8
"""Of a group that is tried."""
_LEAST_GAIN = 0.05
"""Share of the preloading time that a layer more has to save."""


@dataclass(frozen=True, slots=True)
class System:
    """A model on a machine, in the symbols of Table 1.

    Attributes:
        s_m: S_m, bytes of the model: of what is read by channels.
        n_layers: Layers of the model.
        m_max: M_max, the memory budget.
        m_kv: M_kv, bytes of the KV cache, and of all else whose size is fixed.
        si: Average similarity of the layers of a group: share of the active channels that are seen
            in the activation of another layer.
        bw_mem: BW_mem, bytes a second that are computed with.
        bw_flash: Bytes a second that are read in pieces of a channel in so many layers:
            BW_flash^small of 1, BW_flash^large of a whole group.
        hit_rate: hr of a cache with this share of the model, at this sparsity.
    """

    s_m: float
    n_layers: int
    m_max: float
    m_kv: float
    si: float
    bw_mem: float
    bw_flash: Callable[[int], float]
    hit_rate: Callable[[float, float], float]

    @property
    def s_l(self) -> float:
        """S_l, bytes of a layer."""
        return self.s_m / self.n_layers

    @property
    def sp(self) -> float:
        """Sparsity at which what a token uses fits into the budget (section 4.1)."""
        return max(0.0, 1 - self.m_max / self.s_m)


@dataclass(frozen=True, slots=True)
class Cost:
    """What a token costs with groups of ``n`` layers; times are in seconds.

    Attributes:
        sp: Sparsity.
        n: N, layers of a group.
        hr: Hit rate of the cache.
        m_cl: M_cl, bytes of a group's active weights (Eq 9).
        m_cache: M_cache, bytes that are left for the cache (Eq 8); below 0: the budget is too
            small.
        t_load: T_load, of the first group (Eq 3).
        t_comp: T_comp, of a group (Eq 4).
        t_onload: T_onload, for what was not foreseen (Eq 6).
        t_preload: T_preload, of a group (Eq 7).
        n_groups: How many groups there are.
    """

    sp: float
    n: int
    hr: float
    m_cl: float
    m_cache: float
    t_load: float
    t_comp: float
    t_onload: float
    t_preload: float
    n_groups: float

    @property
    def t_overlap(self) -> float:
        """T_overlap, of two groups that follow each other (Eq 5)."""
        return self.t_onload + max(self.t_preload, self.t_comp)

    @property
    def t_decode(self) -> float:
        """T_decode, of a token (Eq 1), with T_overlap once for every two groups."""
        return self.t_load + (self.n_groups - 1) * self.t_overlap + self.t_comp


@dataclass(frozen=True, slots=True)
class Search:
    """What was tried.

    Attributes:
        tried: One layer, two, and so on; none: not even one has room.
        reason: Why no more were tried.
    """

    tried: tuple[Cost, ...]
    reason: str

    @property
    def best(self) -> Cost | None:
        """The fastest."""
        return min(self.tried, key=lambda cost: cost.t_decode, default=None)


def pipeline_cost(system: System, sp: float, n: int) -> Cost:
    """Eqs 3 to 9 for groups of ``n`` layers; all that the budget leaves is cache (Eq 2)."""
    m_cl = system.s_l * (1 - sp) * n
    m_cache = system.m_max - m_cl - system.m_kv
    hr = system.hit_rate(min(max(m_cache / system.s_m, 0), 1), sp)
    small, large = system.bw_flash(1), system.bw_flash(n)
    return Cost(
        sp=sp,
        n=n,
        hr=hr,
        m_cl=m_cl,
        m_cache=m_cache,
        t_load=m_cl * (1 - hr) / small,
        t_comp=m_cl / system.bw_mem,
        t_onload=system.s_l * (1 - sp) * (1 - hr) * (1 - system.si) / small,
        t_preload=m_cl * (1 - hr) / large,
        n_groups=system.n_layers / n,
    )


def search_group(
    system: System, sp: float | None = None, *, most: int = MOST_LAYERS, least: float = _LEAST_GAIN
) -> Search:
    """Preload-and-computation-balanced cross-layer group search: one layer more at a time.

    Longer reads lower the preloading time of a layer. It ends when computing hides preloading, or
    when a layer more saves little.

    Args:
        system: What is searched for.
        sp: Sparsity; the paper's when None.
        most: Layers that are tried.
        least: Share of the preloading time below which a gain is little.
    """
    sparsity = system.sp if sp is None else sp
    tried: list[Cost] = []
    for n in range(1, min(most, system.n_layers) + 1):
        cost = pipeline_cost(system, sparsity, n)
        if cost.m_cache < 0:
            return Search(tuple(tried), f"a group of {n} does not fit into the budget")
        tried.append(cost)
        if cost.t_preload <= cost.t_comp:
            return Search(tuple(tried), "computing takes as long as preloading")
        if n > 1 and _per_layer(cost) > (1 - least) * _per_layer(tried[-2]):
            return Search(tuple(tried), "a layer more saves little")
    return Search(tuple(tried), "no more layers are tried")


def _per_layer(cost: Cost) -> float:
    return cost.t_preload / cost.n

"""ActiveFlow's cost model (section 4.1, Table 1, Eqs 1 to 9), and its search for the group size.

The model describes a pipeline that reads the next group of layers while it computes the current
one, as the paper does it. The engine preloads in another way (``engine_modes``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

__all__ = [
    "MOST_LAYERS",
    "Cost",
    "Search",
    "System",
    "paper_sparsity",
    "pipeline_cost",
    "search_group",
]

MOST_LAYERS = 8
"""Most layers of a group to try."""
_LEAST_GAIN = 0.05
"""Least share of the preloading time that one more layer has to save."""


@dataclass(frozen=True, slots=True)
class System:
    """Model on a machine, in the symbols of Table 1.

    Attributes:
        s_m: S_m, bytes of the model's weights that are read by channels.
        n_layers: Number of layers of the model.
        m_max: M_max, the memory budget.
        m_kv: M_kv, bytes of the KV cache and of everything else whose size is fixed.
        si: Mean similarity of the layers of a group: share of the active channels that the
            activation of another layer predicts.
        bw_mem: BW_mem, bytes per second of computing with weights in memory.
        bw_flash: Function from a number of layers to the bytes per second of reads of one channel
            in that many layers. BW_flash^small is its value for 1, BW_flash^large for a whole
            group.
        hit_rate: Function from the share of the model in the cache and the sparsity to the hit rate
            hr.
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
        """Sparsity at which the weights that a token uses fit into the budget."""
        return paper_sparsity(self.s_m, self.m_max)


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of a token with groups of ``n`` layers; times are in seconds.

    Attributes:
        sp: Sparsity.
        n: N, layers of a group.
        hr: Hit rate of the cache.
        m_cl: M_cl, bytes of a group's active weights (Eq 9).
        m_cache: M_cache, bytes left for the cache (Eq 8); negative if the budget is too small.
        t_load: T_load, time to load the first group (Eq 3).
        t_comp: T_comp, time to compute a group (Eq 4).
        t_onload: T_onload, time to load what was not predicted (Eq 6).
        t_preload: T_preload, time to preload a group (Eq 7).
        n_groups: Number of groups.
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
        """T_overlap, time of two consecutive groups (Eq 5)."""
        return self.t_onload + max(self.t_preload, self.t_comp)

    @property
    def t_decode(self) -> float:
        """T_decode, time of a token (Eq 1), with T_overlap once for every two groups."""
        return self.t_load + (self.n_groups - 1) * self.t_overlap + self.t_comp


@dataclass(frozen=True, slots=True)
class Search:
    """Result of the search for a group size.

    Attributes:
        tried: Costs of one layer, two, and so on; empty if not even one layer fits.
        reason: Why the search stopped.
    """

    tried: tuple[Cost, ...]
    reason: str

    @property
    def best(self) -> Cost | None:
        """Cost with the shortest decoding time, or None."""
        return min(self.tried, key=lambda cost: cost.t_decode, default=None)


def paper_sparsity(s_m: float, m_max: float) -> float:
    """Return ``sp = 1 - M_max / S_m``, with which active weights fit the budget (section 4.1)."""
    return max(0.0, 1 - m_max / s_m)


def pipeline_cost(system: System, sp: float, n: int) -> Cost:
    """Apply Eqs 3 to 9 to groups of ``n`` layers; the rest of the budget is cache (Eq 2)."""
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
    """Search the group size, adding one layer at a time.

    This is the paper's "preload-and-computation-balanced cross-layer group search". Longer reads
    lower the preloading time per layer. The search ends when computing hides preloading, or when
    one more layer saves little.

    Args:
        system: Model and machine.
        sp: Sparsity; None uses the paper's.
        most: Most layers to try.
        least: Least share of the preloading time that one more layer has to save.
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
            return Search(tuple(tried), "one more layer saves little")
    return Search(tuple(tried), "reached the largest group to try")


def _per_layer(cost: Cost) -> float:
    return cost.t_preload / cost.n

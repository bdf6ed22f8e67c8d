"""Figures of LLMS §5 about switching, and the replays that each needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

__all__ = ["ABLATIONS", "FIGURES", "OURS", "Case", "Figure", "Grid"]

OURS = "ours"
_PAPER = (OURS, "LMK", "Swapping", "vLLM-S", "vLLM-SQ", "vLLM-SQ in cells")
_ALL = (*_PAPER, "LlamaRAMCache", "LlamaDiskCache")

ABLATIONS: Mapping[str, Mapping[str, Any]] = {
    OURS: {},
    "without tolerance-aware compression": {"codec": "int8"},
    "without recompute": {"recompute": False},
    "without ahead-of-time writes": {"swap_out": "on_demand"},
    "with LCTRU": {"eviction": "lctru"},
    "with parking": {"parked_tokens": 8192},
}
"""Plugin settings that each leave out one technique, or add one that is off by default."""


@dataclass(frozen=True, slots=True)
class Case:
    """One replay.

    Attributes:
        system: Name of the system in ``SYSTEMS``.
        label: Name of the replay in the figure.
        pattern: Pattern of the trace.
        contexts: Number of contexts in the trace.
        rate_minutes: Mean time between calls in the trace, in minutes.
        max_tokens: Length limit of a context in tokens.
        budget_share: Memory budget as a share of the f16 cells of ``budget_contexts`` contexts.
        budget_contexts: Number of contexts that sets the budget, so that the budget stays equal
            when a figure varies ``contexts``.
        options: Options of the system.
    """

    system: str
    label: str
    pattern: str = "markov"
    contexts: int = 16
    rate_minutes: float = 5.0
    max_tokens: int = 2048
    budget_share: float = 0.25
    budget_contexts: int = 16
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Grid:
    """Choices of the command line for a figure.

    Attributes:
        contexts: Numbers of contexts; the largest sets the budget.
        patterns: Patterns of the traces.
        systems: Names in ``SYSTEMS``.
        max_tokens: Length limit of a context in tokens.
        budget_share: Memory budget as a share of the f16 cells of the most contexts.
        ours: Settings of the plugin.
    """

    contexts: Sequence[int]
    patterns: Sequence[str]
    systems: Sequence[str]
    max_tokens: int
    budget_share: float
    ours: Mapping[str, Any]

    def case(self, system: str, **changes: Any) -> Case:
        """Return a case of one of the systems."""
        case = Case(
            system,
            system,
            pattern=self.patterns[0],
            contexts=max(self.contexts),
            max_tokens=self.max_tokens,
            budget_share=self.budget_share,
            budget_contexts=max(self.contexts),
            options=self.ours if system == OURS else {},
        )
        return replace(case, **changes)


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure.

    Attributes:
        title: Title of the figure.
        cases: Function that yields the figure's replays.
        contexts: Default numbers of contexts.
        systems: Default systems, names in ``SYSTEMS``.
        panel: Attribute of ``Case`` that separates the panels.
        x: Attribute of ``Case`` on the x axis; None draws bars.
        log_x: Whether the x axis is logarithmic.
        counts_contexts: Whether the y axis is the most contexts under a latency limit.
    """

    title: str
    cases: Callable[[Grid], Iterator[Case]]
    contexts: Sequence[int] = (16,)
    systems: Sequence[str] = _PAPER
    panel: str = "pattern"
    x: str | None = None
    log_x: bool = False
    counts_contexts: bool = False


def _latency(grid: Grid) -> Iterator[Case]:
    for pattern in grid.patterns:
        for n in grid.contexts:
            for system in grid.systems:
                yield grid.case(system, pattern=pattern, contexts=n)


def _budgets(grid: Grid) -> Iterator[Case]:
    for share in (0.125, 0.25, 0.375):
        for n in grid.contexts:
            for system in grid.systems:
                yield grid.case(system, contexts=n, budget_share=share)


def _lengths(grid: Grid) -> Iterator[Case]:
    """Yield cases of several context lengths; the budget shrinks with the length."""
    for max_tokens in (256, 512, 1024, 2048, 4096):
        for n in grid.contexts:
            for system in grid.systems:
                yield grid.case(system, contexts=n, max_tokens=max_tokens)


def _ablation(grid: Grid) -> Iterator[Case]:
    for pattern in grid.patterns:
        for label, options in ABLATIONS.items():
            settings = {**grid.ours, **options}
            yield grid.case(OURS, label=label, pattern=pattern, options=settings)


def _chunk_sizes(grid: Grid) -> Iterator[Case]:
    """Yield cases of several chunk sizes for the two systems that use chunks.

    Chunks of this suite always have 16 tokens, so its latency is one line.
    """
    yield grid.case(OURS, options={**grid.ours})
    for n_tokens in (4, 8, 16, 32, 64, 128):
        for system in ("vLLM-S", "vLLM-SQ in cells"):
            yield grid.case(system, options={"chunk_tokens": n_tokens})


def _intervals(grid: Grid) -> Iterator[Case]:
    for minutes in (0.05, 0.2, 1.0, 5.0, 15.0):
        for system in grid.systems:
            yield grid.case(system, rate_minutes=minutes)


_GRID = (2, 4, 6, 8, 12, 16)

FIGURES: Mapping[str, Figure] = {
    "fig9": Figure("Switch latency by active contexts", _latency, _GRID, x="contexts"),
    "fig10": Figure(
        "Active contexts by memory budget",
        _budgets,
        _GRID,
        x="budget_share",
        counts_contexts=True,
    ),
    "fig11": Figure(
        "Active contexts by maximal length",
        _lengths,
        _GRID,
        x="max_tokens",
        log_x=True,
        counts_contexts=True,
    ),
    "fig13": Figure("Switch latency by technique", _ablation),
    "fig14": Figure("Switch latency by chunk size", _chunk_sizes, x="chunk_tokens", log_x=True),
    "fig15": Figure(
        "Switch latency by mean time between calls", _intervals, x="rate_minutes", log_x=True
    ),
    "one": Figure("Switch latency", _latency, systems=_ALL),
}
"""Figures by the paper's numbers; ``one`` is a single cell of Fig. 9."""

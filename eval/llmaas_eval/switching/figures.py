"""The figures of LLMS §5 about switching: which replays each needs."""

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
"""Settings of the plugin that leave out one technique each, or take one that is off by default."""


@dataclass(frozen=True, slots=True)
class Case:
    """One replay.

    Attributes:
        system: Its name in ``SYSTEMS``.
        label: What the figure calls it.
        pattern: Of the trace.
        contexts: Of the trace.
        rate_minutes: Of the trace.
        max_tokens: Longest context.
        budget_share: Of what ``budget_contexts`` contexts need as f16.
        budget_contexts: See there; the budget does not grow with the contexts of a figure.
        options: The system's own.
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
    """What a figure is asked for on the command line.

    Attributes:
        contexts: Numbers of contexts; the largest decides the budget.
        patterns: Of the traces.
        systems: Names in ``SYSTEMS``.
        max_tokens: Longest context.
        budget_share: Share of the f16 cells of the most contexts.
        ours: Settings of the plugin.
    """

    contexts: Sequence[int]
    patterns: Sequence[str]
    systems: Sequence[str]
    max_tokens: int
    budget_share: float
    ours: Mapping[str, Any]

    def case(self, system: str, **changes: Any) -> Case:
        """A case of one of the systems."""
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
        title: What it shows.
        cases: Its replays.
        contexts: Numbers of contexts, unless others are asked for.
        systems: Likewise, names in ``SYSTEMS``.
        panel: Attribute of ``Case`` that tells its panels apart.
        x: Attribute of ``Case`` along its x axis; None: bars.
        log_x: That axis is logarithmic.
        counts_contexts: Its y axis is the most contexts under a limit of latency.
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
    """The budget shrinks with the contexts."""
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
    """Ours has chunks of 16 tokens, so the two systems are varied whose idea chunks are."""
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
    "fig13": Figure("What each technique is worth", _ablation),
    "fig14": Figure("Switch latency by chunk size", _chunk_sizes, x="chunk_tokens", log_x=True),
    "fig15": Figure(
        "Switch latency by mean time between calls", _intervals, x="rate_minutes", log_x=True
    ),
    "one": Figure("Switch latency", _latency, systems=_ALL),
}
"""By the paper's numbers; ``one`` is a single cell of Fig. 9."""

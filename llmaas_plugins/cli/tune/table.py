"""The table of figures, and the reasons, as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from llmaas_plugins.cli.output import size_text
from llmaas_plugins.cli.tune.figures import Case, Figures
from llmaas_plugins.cli.tune.parts import Outcome
from llmaas_plugins.cli.tune.verdicts import speed_text

__all__ = ["reasons", "table"]

_HEAD = ("plugin", "case", "first token", "token", "same token", "loss", "peak memory", "verdict")
_NONE = "-"


def table(outcomes: Mapping[str, Outcome]) -> Iterator[str]:
    """Yield a table of all comparisons with vanilla; speeds are relative to it."""
    rows: list[tuple[str, ...]] = [_HEAD]
    for name, outcome in outcomes.items():
        rows += _rows(name, outcome)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield "  ".join(cells).rstrip()


def reasons(outcomes: Mapping[str, Outcome]) -> Iterator[str]:
    """Yield the verdicts, with their reasons."""
    for name, outcome in outcomes.items():
        state = outcome.verdict.state
        yield f"{name}: {state.upper() if state == 'broken' else state}; {outcome.verdict.reason}"


# -- inside --------------------------------------------------------------------------------------


def _rows(name: str, outcome: Outcome) -> Iterator[tuple[str, ...]]:
    figures, state = outcome.figures, outcome.verdict.state
    if figures is None or not figures.cases:
        yield (name, *[_NONE] * 6, state)
        return
    for i, case in enumerate(figures.cases):
        first = (name, _memory(figures), state) if i == 0 else ("", "", "")
        yield (first[0], *_cells(case), *first[1:])


def _cells(case: Case) -> tuple[str, ...]:
    value, low, high = case.loss_change
    return (
        case.name,
        speed_text(case.first_speed),
        _NONE if case.token_speed is None else speed_text(case.token_speed),
        f"{100 * case.agreement:.1f} %",
        f"{value:+.3f} [{low:+.3f}, {high:+.3f}]",
    )


def _memory(figures: Figures) -> str:
    if figures.peak_bytes is None:
        return _NONE
    beside = figures.vanilla_peak_bytes
    vanilla = "" if beside is None else f" ({size_text(beside)})"
    return f"{size_text(figures.peak_bytes)}{vanilla}"

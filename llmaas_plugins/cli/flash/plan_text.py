"""Text that ``llmaas flash plan`` prints."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmaas_plugins.flash_weights.engine_modes import Hardware, Prediction
    from llmaas_plugins.flash_weights.planner import ModePlan

__all__ = ["plan_text"]

_MIB = 1 << 20
_HEAD = (
    "mode",
    "sparsity",
    "N",
    "keeps",
    "reads",
    "in memory",
    "ms a token",
    "read a token",
    "least budget",
)


def plan_text(
    model: Path, made: ModePlan, machine: Hardware, source: Path, report: Mapping[str, Any]
) -> Iterator[str]:
    """Yield the lines that say what was measured, predicted and recommended."""
    disk = machine.disk
    yield f"{model}, read from {source.name}"
    yield (
        f"disk: {1e6 * disk.read_s:.0f} µs a read and {disk.bytes_per_s / 1e9:.2f} GB/s; best with "
        f"{disk.small_depth} short or {disk.large_depth} long reads in flight; channels up to "
        f"{disk.gap_bytes >> 10} KiB apart are best read together"
    )
    yield (
        f"memory: {machine.bytes_per_s / 1e9:.1f} GB/s with as many threads as Llama uses; "
        f"`llmaas serve` takes {machine.process // _MIB} MiB before it loads a model"
    )
    if report["channels"] is not None:
        yield _channels(report["channels"], model, made.sparsity)
    yield ""
    yield from _table(made)
    yield ""
    if made.search is not None:
        yield (
            "pipeline: predictions of ActiveFlow's equations for reading groups of N layers ahead "
            f"(preload); {_ended(made)}."
        )
    yield from report["notes"]
    yield from _settings(made, report["settings"])
    measured = report["measured"]
    if measured is not None:
        row = made.recommended
        yield (
            f"Measured: {1e3 * measured['token_s']:.1f} ms a token (predicted "
            f"{1e3 * row.token_s:.1f}), {measured['read'] / 1e6:.1f} MB read (predicted "
            f"{row.read / 1e6:.1f})."
        )


# -- inside --------------------------------------------------------------------------------------


def _channels(channels: Mapping[str, Any], model: Path, sparsity: float) -> str:
    """Say how channels are used, and whether that was measured."""
    known = {name: "measured" if channels["measured"][name] else "assumed"
             for name in ("similarity", "hit_rate")}  # fmt: skip
    line = (
        f"channels: at {100 * sparsity:.0f} % sparsity, the group of layers before foresees "
        f"{100 * channels['similarity']:.0f} % of those that a token uses "
        f"({known['similarity']}), and a cache of {100 * channels['cached']:.0f} % of all has "
        f"{100 * channels['hit_rate']:.0f} % of them (from {known['hit_rate']} magnitudes)"
    )
    if all(channels["measured"].values()):
        return line
    return f"{line}; `llmaas flash pack --sparse {model}` measures what is assumed"


def _settings(made: ModePlan, settings: Mapping[str, Any]) -> Iterator[str]:
    yield f"Recommended: {_recommendation(made)}."
    yield "[plugins.flash_weights]"
    for name, value in settings.items():
        shown = f'"{value}"' if isinstance(value, str) else str(value)
        yield f"{name} = {shown.lower() if isinstance(value, bool) else shown}"


def _recommendation(made: ModePlan) -> str:
    """Return the recommended mode and the reason."""
    exact, sparse, chosen = made.exact, made.fastest_sparse, made.recommended
    fits = exact.read == 0
    if sparse is None or (fits and made.sparsity == 0):
        return "exact; all weights fit" if fits else "exact; nothing else works here"
    times = f"{exact.token_s / sparse.token_s:.1f} times as fast"
    if chosen.mode == "sparse":
        return f"sparse; {times} as the exact mode, but it changes the text"
    reason = "all weights fit, and " if fits else ""
    return f"exact; {reason}the sparse mode would be {times}, but it changes the text"


def _ended(made: ModePlan) -> str:
    """Return why the pipeline search ended, and its result."""
    assert made.search is not None
    best = made.search.best
    return made.search.reason + (f", and the best is N = {best.n}" if best else "")


def _table(made: ModePlan) -> Iterator[str]:
    found = (made.exact, *made.sparse, *made.pipeline)
    rows = [_HEAD, *(_cells(row, made.budget) for row in found)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for mode, *cells in rows:
        shown = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
        yield "  ".join([mode.ljust(widths[0]), *shown])


def _cells(row: Prediction, budget: int) -> tuple[str, ...]:
    works = budget >= row.least_budget
    return (
        row.mode,
        f"{100 * row.sparsity:.0f} %",
        str(row.group_layers or "-"),
        row.keeps or "-",
        _reads(row),
        f"{row.cache // _MIB} MiB" if works else "-",
        f"{1e3 * row.token_s:.1f}" if works else "-",
        f"{row.read / 1e6:.1f} MB" if works else "-",
        f"{math.ceil(row.least_budget / _MIB)} MiB",
    )


def _reads(row: Prediction) -> str:
    """Return when weights that are not in memory are read."""
    if row.preload:
        return "preload"
    return "on demand" if row.keeps in {"busiest", "shared"} else "ahead"

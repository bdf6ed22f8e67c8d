"""Tables of what the benchmarks in ``eval/bench`` measure, made of pytest-benchmark's JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from llmaas_eval.tables import NoRowsError, Output, number

__all__ = ["Bench", "benches", "figures", "grouped", "quartiles"]


class Bench(NamedTuple):
    """One run of a benchmark.

    Attributes:
        params: Its parameters, by name.
        info: Its figures, by name.
        machine: Machine that it ran on.
    """

    params: Mapping[str, Any]
    info: Mapping[str, Any]
    machine: str


def benches(outputs: Sequence[Output], function: str) -> list[Bench]:
    """Return the runs of ``file::function`` in order; a later output replaces earlier runs.

    Raises:
        NoRowsError: It was not run.
    """
    found = {
        (output["machine"], bench["fullname"]): Bench(
            bench["params"] or {}, bench["extra_info"], output["machine"]
        )
        for output in outputs
        for bench in output["benchmarks"]
        if _function(bench["fullname"]) == function
    }
    if not found:
        raise NoRowsError(f"found no run of {function}")
    return list(found.values())


def figures(
    outputs: Sequence[Output], function: str, *names: str
) -> dict[tuple[Any, ...], Mapping[str, Any]]:
    """Return the figures of a benchmark function by the values of these parameters.

    Raises:
        NoRowsError: It was not run.
    """
    return {
        tuple(bench.params[name] for name in names): bench.info
        for bench in benches(outputs, function)
    }


def _function(name: str) -> str:
    """Return the file and the function of a run's name, which also has folders and parameters."""
    path, _, function = name.partition("[")[0].partition("::")
    return f"{Path(path).stem}::{function}"


def quartiles(found: Sequence[float], unit: str = "") -> str:
    """Return a median and its quartiles, with three digits of the median."""
    digits = 0 if found[0] >= 100 else 1 if found[0] >= 10 else 2
    median, low, high = (f"{value:,.{digits}f}" for value in found)
    return f"{median}{unit} ({low}–{high})"


def grouped(value: float) -> str:
    """Return a number with three digits, and its thousands apart."""
    return f"{value:,.0f}" if value >= 100 else number(value)

"""Outputs of studies, kept as tables in ``eval/results``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from llmaas_eval.tables import Maker, Output, Table, read_output

__all__ = ["REPORTS", "KeepError", "keep", "kept", "makers"]

REPORTS = (
    "llmaas_eval.all_on",
    "llmaas_eval.commands",
    "llmaas_eval.switching.report",
    "llmaas_eval.tolerance.report",
    "llmaas_eval.window.report",
    "llmaas_eval.knn.report",
    "llmaas_eval.sparse.report",
    "llmaas_eval.elastic.report",
    "llmaas_eval.distillation.report",
    "llmaas_eval.recovery.report",
    "llmaas_eval.scratch.report",
    "llmaas_eval.division.report",
    "llmaas_eval.drafts.report",
    "llmaas_eval.deadlines.kept",
    "llmaas_eval.deadlines.certificate_report",
    "llmaas_eval.deadlines.loaded.kept",
    "llmaas_eval.deadlines.alone.kept",
    "llmaas_eval.tasks.report",
    "llmaas_eval.prompts.narrow_tables",
    "llmaas_eval.prompts.decision_tables",
    "llmaas_eval.prompts.design_tables",
    "llmaas_eval.prompts.gap_tables",
    "llmaas_eval.prompts.short_tables",
    "llmaas_eval.prompts.word_scorer_tables",
    "llmaas_eval.pareto.report",
    "llmaas_eval.sizes.report",
    "llmaas_eval.benchmarks.kv_chunks",
    "llmaas_eval.benchmarks.engine",
    "llmaas_eval.benchmarks.elastic",
    "llmaas_eval.benchmarks.flash_weights",
    "llmaas_eval.benchmarks.knn_lm",
    "llmaas_eval.benchmarks.deadlines",
    "llmaas_eval.benchmarks.service",
)
"""Modules with ``TABLES``."""


class KeepError(Exception):
    """Outputs from which a table cannot be made."""


def makers() -> dict[str, Maker]:
    """Return the functions that make tables, by the tables' names."""
    return {name: make for report in REPORTS for name, make in import_module(report).TABLES.items()}


def keep(name: str, paths: Sequence[Path], path: Path) -> None:
    """Make a table of outputs, and write it and how it was measured.

    Args:
        name: Name of the table.
        paths: JSON files that studies wrote.
        path: File to write; it is replaced atomically.

    Raises:
        KeepError: The table is unknown, or the outputs do not have it.
    """
    known = makers()
    if name not in known:
        raise KeepError(f"no study makes {name}; expected one of {', '.join(sorted(known))}")
    outputs = [_read(path) for path in paths]
    try:
        table = known[name](outputs)
        document = kept(table, outputs, [path.name for path in paths])
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        found = ", ".join(map(str, paths))
        problem = f"{error} is missing" if isinstance(error, KeyError) else error
        raise KeepError(f"{name} cannot be made of {found}: {problem}") from error
    _replace(path, _text(document))


def kept(table: Table, outputs: Sequence[Output], files: Sequence[str]) -> dict[str, Any]:
    """Return a table as a result, with the record of the runs that made the outputs.

    Raises:
        KeyError: An output does not say with which versions it was measured.
        ValueError: The table is empty, or its rows differ in length, or the runs used several
            versions.
    """
    widths = {len(row) for row in table.rows}
    if widths != {len(table.columns)} or len(table.align) != len(table.columns):
        raise ValueError(f"found rows of {sorted(widths)} cells, expected {len(table.columns)}")
    runs = [output.get("run", output) for output in outputs]
    versions = runs[0]["versions"]
    if any(run["versions"] != versions for run in runs):
        raise ValueError(f"found outputs of versions {[run['versions'] for run in runs]}")
    return {
        "command": _joined(runs, "command", "; "),
        "machine": _joined(runs, "machine", " and "),
        "versions": versions,
        "date": _joined(runs, "date", ", "),
        "commit": _joined(runs, "commit", ", "),
        "source": f"kept from {', '.join(files)}",
        "align": table.align,
        "columns": list(table.columns),
        "rows": [list(row) for row in table.rows],
    }


def _joined(runs: Sequence[Mapping[str, Any]], key: str, by: str) -> str | None:
    """Return what the runs record under ``key``, without repetitions."""
    return by.join(dict.fromkeys(str(run[key]) for run in runs if run.get(key))) or None


def _read(path: Path) -> Output:
    try:
        return read_output(path)
    except (OSError, ValueError) as error:
        raise KeepError(f"{path} cannot be read: {error}") from error


def _text(document: Mapping[str, Any]) -> str:
    """Return a result as JSON, with a line for each row."""
    fields = [
        f" {json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}"
        for key, value in document.items()
        if key != "rows"
    ]
    rows = [f"  {json.dumps(row, ensure_ascii=False)}" for row in document["rows"]]
    return "{\n" + ",\n".join([*fields, ' "rows": [\n' + ",\n".join(rows) + "\n ]"]) + "\n}\n"


def _replace(path: Path, text: str) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)

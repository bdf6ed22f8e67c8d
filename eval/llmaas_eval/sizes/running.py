"""All features run on a model, and the table of what each took."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from llmaas_eval.data import packaged_chats
from llmaas_eval.measured import measured_once
from llmaas_eval.sizes.features import EXPORT, GROUPS, MODEL, Feature, remove
from llmaas_eval.sizes.watching import Limits, Watched, watch
from llmaas_eval.tables import Maker, Output, Table, number

__all__ = ["TABLES", "Row", "run_features"]

Row = Mapping[str, Any]
_REFUSED = 2
_N_CHATS = 8
_MOST_WORDS = 160


def run_features(model: Path, folder: Path, limits: Limits, only: Sequence[str] = ()
                 ) -> Iterator[Row]:  # fmt: skip
    """Run the features in turn, and yield what each took; what was measured earlier is kept.

    Args:
        model: GGUF file.
        folder: Folder for all files that are made, on a disk with room for one as large as the
            model.
        limits: Limits of each feature.
        only: Words of which a feature's name must contain one; all features if there are none.
    """
    kept = folder / "measured"
    kept.mkdir(parents=True, exist_ok=True)
    _place(model, folder)
    status = model.stat()
    about = {"bytes": status.st_size, "changed": status.st_mtime_ns}
    for group in GROUPS:
        has_worked = dict[str, bool]()
        for feature in group.features:
            if only and not any(word in feature.name for word in only):
                continue
            if not has_worked.get(feature.needs, not feature.needs):
                row: Row = _skipped(feature)
            else:
                key = {**about, "feature": feature.name}
                row = measured_once(kept, key, partial(_run, feature, folder, limits))
            has_worked[feature.name] = row["verdict"] == "works"
            yield row
        remove(folder, group.made)


# -- inside --------------------------------------------------------------------------------------


def _place(model: Path, folder: Path) -> None:
    """Put the model and some chats into a run's folder."""
    link = folder / MODEL
    link.unlink(missing_ok=True)
    link.symlink_to(model.absolute())
    lines = [line for path in packaged_chats() for line in path.read_text().splitlines()]
    (folder / EXPORT).write_text("\n".join(lines[:_N_CHATS]) + "\n")


def _run(feature: Feature, folder: Path, limits: Limits) -> Row:
    sys.stderr.write(f"{feature.name} ...\n")
    kept = {key: value for key, value in os.environ.items() if not key.startswith("XDG_")}
    settings = {"HOME": str(folder.absolute())}  # the user's caches stay out
    found = watch(feature.command, kept | settings, folder, limits)
    return _row(feature.name, found, limits)


def _row(name: str, found: Watched, limits: Limits) -> Row:
    last = found.said[-1] if found.said else "no output"
    if found.status is None:
        verdict, why = "failed", f"stopped after {limits.seconds:.0f} s: {last}"
    elif found.status in (0, _REFUSED):
        verdict, why = ("refused" if found.status else "works"), last
    else:
        verdict, why = "failed", f"exit status {found.status}: {last}"
    return {"feature": name, "verdict": verdict, "why": why, **found._asdict()}


def _skipped(feature: Feature) -> Row:
    return {"feature": feature.name, "verdict": "skipped", "why": f"needs {feature.needs}"}


def _table(outputs: Sequence[Output]) -> Table:
    """Show what each feature took on each model."""
    heads = ["model", "feature", "verdict", "time, s", "memory, GB", "with mapped files, GB",
             "read, GB", "longest silence, s", "last line"]  # fmt: skip
    rows = [
        [output["model"], row["feature"], row["verdict"], *_figures(row), _cut(row["why"])]
        for output in outputs
        for row in output["rows"]
    ]
    return Table(heads, rows, "lllrrrrrl")


def _figures(row: Row) -> list[str]:
    if "seconds" not in row:
        return [""] * 5
    sizes = (row["private_bytes"], row["resident_bytes"], row["read_bytes"])
    gigabytes = [number(size / 1e9, 2) for size in sizes]
    return [number(row["seconds"], 1), *gigabytes, number(row["silent_s"], 1)]


def _cut(text: str) -> str:
    return text if len(text) <= _MOST_WORDS else f"{text[: _MOST_WORDS - 1]}…"


TABLES: Mapping[str, Maker] = {"sizes": _table}
"""Functions that make the tables."""

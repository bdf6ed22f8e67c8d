"""All features run on a model, with what each took."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from llmaas_eval.data import packaged_chats
from llmaas_eval.measured import measured_once, measured_path
from llmaas_eval.sizes.features import EXPORT, GROUPS, MODEL, Feature, Group, remove
from llmaas_eval.sizes.watching import Limits, Watched, watch

__all__ = ["Row", "run_features"]

Row = Mapping[str, Any]
_REFUSED, _FAILED = 2, "failed"
_N_CHATS = 8


def run_features(model: Path, folder: Path, limits: Limits, only: Sequence[str] = ()
                 ) -> Iterator[Row]:  # fmt: skip
    """Run the features in turn, and yield what each took.

    Features that worked or were refused earlier are not run again, unless a feature that has to run
    needs files of theirs that are gone.

    Args:
        model: GGUF file.
        folder: Folder for all files that are made, on a disk with room for one as large as the
            model.
        limits: Limits of each feature.
        only: Words of which a feature's name must contain one, unless another feature needs it;
            all features if there are none.
    """
    kept = folder / "measured"
    kept.mkdir(parents=True, exist_ok=True)
    _place(model, folder)
    status = model.stat()
    about = {"bytes": status.st_size, "changed": status.st_mtime_ns}
    for group in GROUPS:
        files = {
            feature.name: measured_path(kept, {**about, "feature": feature.name})
            for feature in group.features
        }
        chosen = _chosen(group, only)
        for name in _needed_again(group, chosen, folder, {n for n in files if files[n].exists()}):
            files[name].unlink(missing_ok=True)
        has_worked = dict[str, bool]()
        for feature in chosen:
            if has_worked.get(feature.needs, not feature.needs):
                key = {**about, "feature": feature.name}
                row: Row = measured_once(kept, key, partial(_run, feature, folder, limits))
            else:
                row = _skipped(feature)
            if row["verdict"] == _FAILED:
                files[feature.name].unlink()  # the next run tries it again
            has_worked[feature.name] = row["verdict"] == "works"
            yield row
        remove(folder, group.made)


# -- inside --------------------------------------------------------------------------------------


def _chosen(group: Group, only: Sequence[str]) -> list[Feature]:
    """Return the features to run: those whose names have one of the words, and what they need."""
    names = set[str]()
    for feature in reversed(group.features):  # needs are earlier ones
        is_named = not only or any(word in feature.name for word in only)
        if is_named or feature.name in names:
            names |= {feature.name, feature.needs}
    return [feature for feature in group.features if feature.name in names]


def _needed_again(
    group: Group, chosen: Sequence[Feature], folder: Path, known: Collection[str]
) -> Iterator[str]:
    """Yield features whose files others need that have to run, if the files are gone."""
    if not group.made or any(True for each in group.made for _ in folder.glob(each)):
        return
    needs = {feature.name: feature.needs for feature in group.features}
    for feature in chosen:
        need = "" if feature.name in known else feature.needs
        while need:
            yield need
            need = needs[need]


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
    home = str(folder.absolute())  # the user's caches stay out
    found = watch(feature.command, kept | {"HOME": home}, folder, limits)
    said = tuple(line.replace(home, "~") for line in found.said)
    return _row(feature.name, found._replace(said=said), limits)


def _row(name: str, found: Watched, limits: Limits) -> Row:
    last = found.said[-1] if found.said else "no output"
    if found.status is None:
        verdict, why = _FAILED, f"stopped after {limits.seconds:.0f} s: {last}"
    elif found.status in (0, _REFUSED):
        verdict, why = ("refused" if found.status else "works"), last
    else:
        verdict, why = _FAILED, f"exit status {found.status}: {last}"
    return {"feature": name, "verdict": verdict, "why": why, **found._asdict()}


def _skipped(feature: Feature) -> Row:
    return {"feature": feature.name, "verdict": "skipped", "why": f"needs {feature.needs}"}

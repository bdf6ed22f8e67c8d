"""Features that are run on a model, each by a command in a process of its own.

Features that need the same made file form a group. At the end of a group its files are deleted, so
that a disk needs room for the model and one file made of it.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

__all__ = ["ELASTIC", "EXPORT", "GROUPS", "MODEL", "Feature", "Group", "remove"]

MODEL, ELASTIC, EXPORT = "model.gguf", "model.elastic.gguf", "chats.jsonl"
"""Names of files in a run's folder: the model, its prepared file, and chats for a datastore."""


class Feature(NamedTuple):
    """A feature, and the command that uses it in the run's folder.

    Attributes:
        name: Name of the feature.
        command: Program and arguments.
        needs: Feature of the same group that must have worked; empty if there is none.
    """

    name: str
    command: Sequence[str]
    needs: str = ""


class Group(NamedTuple):
    """Features in the order in which they run.

    Attributes:
        features: The features.
        made: Patterns of the files and folders that are deleted afterwards.
    """

    features: tuple[Feature, ...]
    made: tuple[str, ...] = ()


def remove(folder: Path, patterns: Sequence[str]) -> None:
    """Delete the files and folders that a group made."""
    for path in (path for pattern in patterns for path in folder.glob(pattern)):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def _llmaas(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "llmaas_plugins.cli.main", *arguments]


def _app(name: str) -> list[str]:
    return [sys.executable, "-m", "llmaas_eval.sizes.app", name]


_PREPARE = ("elastic", "prepare", MODEL, "-o", ELASTIC, "--no-search", "--tokens", "128")
_PROFILE = ("elastic", "profile", ELASTIC, "--prompts", "8,16", "--threads", "2")
_BUILD = ("datastore", "build", EXPORT, "--model", MODEL, "--store", "knn", "--size", "300")

GROUPS: Sequence[Group] = (
    Group((
        Feature("open, stock llama.cpp", _app("vanilla")),
        Feature("identify the model", _app("identify")),
        Feature("open with kv_chunks", _app("open"), "identify the model"),
        Feature("doctor", _llmaas("doctor", "--model", MODEL)),
        Feature("setup --dry-run", _llmaas("setup", MODEL, "--dry-run")),
    )),
    Group((
        Feature("kv_chunks: save 400 tokens", _app("save")),
        Feature("kv_chunks: restore them", _app("restore"), "kv_chunks: save 400 tokens"),
        Feature("short_prompts: attention", _app("shorten")),
    ), ("kv",)),
    Group((
        Feature("a long context, stock llama.cpp", _app("vanilla-long")),
        Feature("kv_chunks: save a long context", _app("save-long"),
                "a long context, stock llama.cpp"),
        Feature("kv_chunks: restore it", _app("restore-long"), "kv_chunks: save a long context"),
    ), ("kv",)),
    Group((
        Feature("knn_lm: build a datastore", _llmaas(*_BUILD, "--n-ctx", "512")),
        Feature("knn_lm: mix", _app("mix"), "knn_lm: build a datastore"),
    ), ("knn",)),
    Group((
        Feature("elastic: prepare", _llmaas(*_PREPARE)),
        Feature("elastic: profile", _llmaas(*_PROFILE), "elastic: prepare"),
        Feature("elastic: switch levels", _app("switch"), "elastic: prepare"),
        Feature("deadlines: a promise", _app("promise"), "elastic: profile"),
    ), (f"{ELASTIC}*", "*.scores.npz", "*.progress")),
    Group((
        Feature("flash_weights: pack", _llmaas("flash", "pack", MODEL)),
        Feature("flash_weights: check", _llmaas("flash", "check", MODEL), "flash_weights: pack"),
        Feature("flash_weights: exact at 60 %", _app("stream"), "flash_weights: pack"),
    ), ("model.packed*",)),
    Group((
        Feature("flash_weights: exact, not packed", _app("stream")),
        Feature("flash_weights: pack --sparse",
                _llmaas("flash", "pack", MODEL, "--sparse", "--equal-shares")),
        Feature("flash_weights: sparse at 60 %", _app("sparse"), "flash_weights: pack --sparse"),
    ), ("model.packed*", "model.channels*")),
)  # fmt: skip
"""All features, in the order in which they run."""

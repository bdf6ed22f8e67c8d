"""The ``llmaas.toml`` that ``llmaas setup`` writes, which it changes only while nobody else did."""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from llmaas_hooks import ConfigError
from llmaas_plugins.cli.switches import switched, switches
from llmaas_plugins.files.file_bytes import as_store_error
from llmaas_plugins.files.partial_file import write_bytes

__all__ = [
    "Settings",
    "check_ours",
    "config_text",
    "names_model",
    "write_config",
    "write_switches",
]

_FIRST = re.compile(r"# Written by `llmaas setup`; sha256 of the lines below: ([0-9a-f]{64})\n")


_READ = (
    '# Requests may read a part of their prompts, as with "prompt_share": 0.5, and do so where no\n'
    "# level is fast enough for the latency that they name"
)
_SHORT_PROMPTS = f"{_READ}.\n[plugins.short_prompts]\n"
_NO_SHORT_PROMPTS = (
    f"{_READ}, if you switch this on.\n"
    "# A tiny model can learn which words matter: see `llmaas prompts learn --help`.\n"
    "# [plugins.short_prompts]\n"
)


@dataclass(frozen=True, slots=True)
class Settings:
    """Content of the file.

    Attributes:
        model: Path of the model.
        digest: Digest of the model.
        made: File to load in its place; the model itself if there is none.
        made_digest: Digest of that file.
        table: Widths of the levels; None without levels.
        is_packed: Whether the weights were packed.
        store: Folder of the datastore; None without one.
        has_words: Whether an encoder has learned which words of prompts to read.
        memory: Memory of the process, as the user typed it; None for the default.
    """

    model: Path
    digest: str
    made: Path
    made_digest: str
    table: str | None
    is_packed: bool
    store: Path | None
    has_words: bool
    memory: str | None


def config_text(settings: Settings) -> str:
    """Return the file's text."""
    parts = ["# Change what you like: from then on, `llmaas setup` leaves this file alone.\n"]
    if settings.made != settings.model:
        parts.append(
            "# Apps name the model as before, and the file that was made of it is loaded.\n"
            f"[models.{_quoted(settings.model)}]\n"
            f"file = {_quoted(settings.made)}\n"
            f'digest = "{settings.digest}"\n'
            f'file_digest = "{settings.made_digest}"\n'
        )
    budget = f"budget = {_quoted(settings.memory)}" if settings.memory else '# budget = "3 GiB"'
    parts.append(
        "# Memory of the process, divided among weights and contexts. If unset, weights may take\n"
        f"# nine tenths of the available memory, and contexts 256 MiB.\n[memory]\n{budget}\n"
    )
    parts.append(
        "# Contexts are kept in chunks, in RAM and on disk, and come back without recomputing.\n"
        '[plugins.kv_chunks]\ndisk_budget = "4 GiB"\n'
    )
    if settings.table is not None:
        parts.append(
            '# Nine widths of the model. A request may choose one: "level": 0.6, from 0.2 to 1.0.\n'
            f'[plugins.elastic]\ntable = "{settings.table}"\n'
        )
        parts.append(
            '# A request may name its latency, as "slo": {"ttft": "300 ms", "tpot": "60 ms"}, and\n'
            "# gets the best level that keeps it.\n[plugins.deadlines]\n"
        )
        parts.append(_SHORT_PROMPTS if settings.has_words else _NO_SHORT_PROMPTS)
    if settings.is_packed:
        parts.append(
            "# Weights that do not fit into memory are streamed.\n[plugins.flash_weights]\n"
        )
    if settings.store is not None:
        parts.append(
            "# Next-token mixing with the chats that were given.\n"
            f"[plugins.knn_lm]\nstore = {_quoted(settings.store)}\n"
        )
    return _stamped("\n".join(parts))


def check_ours(path: Path) -> None:
    """Refuse a file that somebody else wrote or changed.

    Raises:
        ConfigError: The file exists and is not as ``llmaas setup`` wrote it.
    """
    if not _is_ours(path):
        raise ConfigError(
            f"{path} exists and was not written by `llmaas setup`, or was changed since: "
            "move it away. Or `-o FILE` writes the configuration elsewhere, and "
            "`llmaas run --config FILE` reads it there."
        )


def names_model(path: Path, model: Path) -> bool:
    """Return whether a file is there, and names the file that is loaded in place of a model.

    Raises:
        StoreError: The file cannot be read.
    """
    with as_store_error(f"cannot read {path}"):
        text = path.read_text("utf-8", "replace") if path.is_file() else ""
    try:
        return str(model) in tomllib.loads(text).get("models", {})
    except (tomllib.TOMLDecodeError, TypeError):
        return False


def write_config(path: Path, text: str) -> None:
    """Write the file, unless somebody else changed it meanwhile.

    Plugins that ``llmaas tune`` switched off in the file stay off.

    Raises:
        ConfigError: The file exists and is not as ``llmaas setup`` wrote it.
        StoreError: The file cannot be written.
    """
    check_ours(path)
    with as_store_error(f"cannot read {path}"):
        before = path.read_text("utf-8") if path.exists() else ""
    write_bytes(path, _switched(text, switches(before)).encode())


def write_switches(path: Path, choice: Mapping[str, bool]) -> None:
    """Switch plugins on or off in a file, whoever wrote it.

    A file that ``llmaas setup`` wrote stays its own.

    Raises:
        ConfigError: The file is no TOML, or its switches cannot be changed alone.
        StoreError: The file cannot be read or written.
    """
    with as_store_error(f"cannot read {path}"):
        text = path.read_bytes().decode("utf-8")
    is_ours = _FIRST.match(text) is not None and _is_ours(path)
    changed = _switched(text, choice) if is_ours else switched(text, choice)
    write_bytes(path, changed.encode())


def _is_ours(path: Path) -> bool:
    """Return whether a file does not exist, or is as this command wrote it."""
    with as_store_error(f"cannot read {path}"):
        if not path.exists():
            return True
        if not path.is_file():
            return False
        text = path.read_text("utf-8", "replace")
    found = _FIRST.match(text)
    return found is not None and _hash(text[found.end() :]) == found[1]


def _switched(text: str, choice: Mapping[str, bool]) -> str:
    """Return a text of ``llmaas setup`` with plugins on or off, which counts as its own, too."""
    found = _FIRST.match(text)
    return _stamped(switched(text[found.end() if found else 0 :], choice))


def _stamped(body: str) -> str:
    """Return a text with the first line, by which it is known again."""
    return f"# Written by `llmaas setup`; sha256 of the lines below: {_hash(body)}\n{body}"


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _quoted(value: object) -> str:
    """Return a string as TOML."""
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")

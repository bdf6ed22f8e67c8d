"""What ``llmaas store`` and ``llmaas datastore`` share: options, reports, how things are shown."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmaas_hooks import ConfigError
from llmaas_plugins.config import PluginTable, load_config, validated

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from pydantic import BaseModel

__all__ = [
    "add_action",
    "chosen_directory",
    "print_report",
    "printable",
    "progress",
    "progress_bar",
    "settings_of",
    "size_text",
]

_MIB = 1 << 20


def add_action(actions: Any, name: str, func: Any, text: str) -> argparse.ArgumentParser:
    """Register an action on a store, with the options that all of them have."""
    parser: argparse.ArgumentParser = actions.add_parser(name, help=text, description=text)
    parser.add_argument("--config", metavar="FILE", help="llmaas.toml (default: $LLMAAS_CONFIG)")
    parser.add_argument(
        "--store", type=Path, metavar="DIR", help="the store (default: as configured)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(func=func)
    return parser


def settings_of(args: argparse.Namespace, plugin: str, model: type[BaseModel]) -> BaseModel:
    """A plugin's settings, whether it is enabled or not."""
    table = load_config(args.config).plugins.get(plugin, PluginTable(True, {}, {}))
    return validated(plugin, model, table)


def chosen_directory(args: argparse.Namespace, configured: Callable[[], Path]) -> Path:
    """The store's directory: of ``--store``, or as configured."""
    if args.store is not None and not str(args.store):
        raise ConfigError("--store needs a directory")
    path: Path = args.store or configured()
    return path.expanduser()


def size_text(n_bytes: int) -> str:
    """Bytes for people."""
    return f"{n_bytes / _MIB:.1f} MiB" if n_bytes >= _MIB else f"{n_bytes / 1024:.0f} KiB"


def printable(name: str) -> str:
    """Somebody's text, without what a terminal would obey."""
    return name if name.isprintable() else repr(name)


def progress(what: str, unit: str) -> Any:
    """What wraps rows in a progress bar."""
    return lambda rows: _bar(rows, desc=what, unit=unit)


def progress_bar(what: str, unit: str, total: int) -> Any:
    """A progress bar to ``update``; a context manager."""
    return _bar(None, desc=what, unit=unit, total=total)


def _bar(rows: Any, **kwargs: Any) -> Any:
    """On a terminal's stderr."""
    from tqdm import tqdm

    return tqdm(rows, disable=None, leave=False, file=sys.stderr, **kwargs)


def print_report(args: argparse.Namespace, report: dict[str, Any], lines: Iterable[str]) -> None:
    """Print the one for programs or the one for people."""
    try:
        print(json.dumps(report, indent=2) if args.json else "\n".join(lines), flush=True)
    except BrokenPipeError:  # `| head` has seen enough; the interpreter must not try again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

"""How commands show things: reports, progress, sizes and somebody's text."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from llmaas_plugins.cli.ending import close_stdout

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "counted",
    "one_line",
    "print_report",
    "printable",
    "progress",
    "progress_bar",
    "size_text",
]

_MIB = 1 << 20


def size_text(n_bytes: int) -> str:
    """Bytes for people."""
    return f"{n_bytes / _MIB:.1f} MiB" if n_bytes >= _MIB else f"{n_bytes / 1024:.0f} KiB"


def counted(n: int, what: str) -> str:
    """Return a number of things whose plural ends in s."""
    return f"{n:,} {what}" if n == 1 else f"{n:,} {what}s"


def printable(name: str) -> str:
    """Somebody's text, without what a terminal would obey."""
    return name if name.isprintable() else repr(name)


def one_line(text: str) -> str:
    """Somebody's text in a line, with what a terminal would obey spelled out."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def progress(what: str, unit: str) -> Any:
    """What wraps rows in a progress bar."""
    return lambda rows: _bar(rows, desc=what, unit=unit)


def progress_bar(what: str, unit: str, total: int) -> Any:
    """A progress bar to ``update``; a context manager."""
    return _bar(None, desc=what, unit=unit, unit_scale=True, total=total)


def _bar(rows: Any, **kwargs: Any) -> Any:
    """On a terminal's stderr."""
    from tqdm import tqdm

    return tqdm(rows, disable=None, leave=False, file=sys.stderr, **kwargs)


def print_report(args: argparse.Namespace, report: dict[str, Any], lines: Iterable[str]) -> None:
    """Print the one for programs or the one for people."""
    text = json.dumps(report, indent=2, default=str) if args.json else "\n".join(lines)
    try:
        print(text, flush=True)
    except BrokenPipeError:  # `| head` has seen enough; what was found out stays the exit status
        close_stdout()

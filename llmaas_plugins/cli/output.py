"""Output of commands: reports, progress bars, sizes, and text from untrusted sources."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from typing import TYPE_CHECKING, Any, TextIO

from llmaas_plugins.cli.interrupts import close_stdout

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = [
    "counted",
    "duration_text",
    "one_line",
    "print_report",
    "printable",
    "progress",
    "progress_bar",
    "progress_bar_on_copy",
    "setting_text",
    "size_text",
]

_MIB, _GIB = 1 << 20, 1 << 30
_MINUTE_S, _HOUR_S = 60, 3600
_LINE_S = 30.0
"""Seconds between two lines of progress where there is no terminal."""


def size_text(n_bytes: int) -> str:
    """Format a number of bytes as KiB, MiB or, from 10 GiB on, GiB."""
    if n_bytes >= 10 * _GIB:
        return f"{n_bytes / _GIB:.1f} GiB"
    return f"{n_bytes / _MIB:.1f} MiB" if n_bytes >= _MIB else f"{n_bytes / 1024:.0f} KiB"


def setting_text(value: object) -> str:
    """Format a setting as in ``llmaas.toml``, but without quotes; None as ``unset``."""
    from pydantic import ByteSize

    if value is None:
        return "unset"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(setting_text, value))}]"
    if isinstance(value, ByteSize):
        return _exact_size(value)
    return str(value)


def _exact_size(n_bytes: int) -> str:
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if n_bytes and n_bytes % (1 << power) == 0:
            return f"{n_bytes >> power} {unit}"
    return str(int(n_bytes))


def counted(n: int, what: str) -> str:
    """Format a number of things; the plural of ``what`` must end in s."""
    return f"{n:,} {what}" if n == 1 else f"{n:,} {what}s"


def duration_text(seconds: float) -> str:
    """Format an estimated time with one or two digits."""
    if seconds < _MINUTE_S:
        return f"{max(seconds, 1):.0f} s"
    if seconds < _HOUR_S:
        return f"{seconds / _MINUTE_S:.0f} min"
    return f"{seconds / _HOUR_S:.1f} h"


def printable(name: str) -> str:
    """Return text that is safe to print on a terminal."""
    return name if name.isprintable() else repr(name)


def one_line(text: str) -> str:
    """Return text in one line, with characters that terminals interpret escaped."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def progress(what: str, unit: str) -> Any:
    """Return a function that wraps rows in a progress bar."""
    return lambda rows: _bar(rows, desc=what, unit=unit)


def progress_bar(what: str, unit: str, total: int) -> Any:
    """Return a progress bar to ``update``, as a context manager."""
    return _bar(None, desc=what, unit=unit, unit_scale=True, total=total)


@contextlib.contextmanager
def progress_bar_on_copy(what: str, unit: str, total: int) -> Iterator[Any]:
    """Show a progress bar on a copy of stderr: llama-cpp-python closes stderr while it loads."""
    with contextlib.ExitStack() as opened:
        file: TextIO = sys.stderr
        with contextlib.suppress(AttributeError, OSError, ValueError):  # it may be no file
            file = opened.enter_context(os.fdopen(os.dup(sys.stderr.fileno()), "w"))
        yield opened.enter_context(
            _bar(None, desc=what, unit=unit, unit_scale=True, total=total, file=file)
        )


def _bar(rows: Any, *, file: TextIO | None = None, **kwargs: Any) -> Any:
    """Make a progress bar on stderr; without a terminal, it prints a line now and then."""
    from tqdm import tqdm

    shown: Any = sys.stderr if file is None else file
    if shown is not None and not shown.isatty():
        shown = _Lines(shown)
        kwargs |= dict.fromkeys(("mininterval", "maxinterval", "delay"), _LINE_S)
    return tqdm(rows, leave=False, file=shown, **kwargs)


class _Lines:
    """File in which each state of a progress bar is a line of its own, as in a log.

    The work goes on if they cannot be written: nobody reads the pipe any more, or a disk is full.
    """

    def __init__(self, file: TextIO) -> None:
        """Write to this file."""
        self._file = file

    def write(self, text: str) -> None:
        """Write one state; what only overwrites an earlier one on a terminal is dropped."""
        if line := text.strip():
            with contextlib.suppress(OSError):
                self._file.write(f"{line}\n")

    def flush(self) -> None:
        """Write out what was buffered."""
        with contextlib.suppress(OSError):
            self._file.flush()


def print_report(args: argparse.Namespace, report: dict[str, Any], lines: Iterable[str]) -> None:
    """Print a report as JSON with ``--json``, else as lines of text."""
    text = json.dumps(report, indent=2, default=str) if args.json else "\n".join(lines)
    try:
        print(text, flush=True)
    except BrokenPipeError:  # the reader closed the pipe; the exit status still tells the result
        close_stdout()

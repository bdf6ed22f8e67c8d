"""Reading and writing of trace files."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from llmaas_eval.traces.types import Trace, TraceCall

__all__ = ["read_trace", "write_trace"]

_FORMAT = "llmaas-trace"
_VERSION = 1


def write_trace(trace: Trace, path: Path) -> None:
    """Write the header, then one line for each call."""
    header = {"format": _FORMAT, "version": _VERSION, "settings": dict(trace.settings)}
    calls = ({k: v for k, v in asdict(call).items() if v is not None} for call in trace.calls)
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in (header, *calls))


def read_trace(path: Path) -> Trace:
    """Read a file that ``write_trace`` wrote.

    Raises:
        ValueError: The file is not a trace, or has another format version.
    """
    with path.open(encoding="utf-8") as file:
        header = json.loads(next(file, "null"))
        if not isinstance(header, dict) or header.get("format") != _FORMAT:
            raise ValueError(f"{path}: found no header, expected one of format {_FORMAT!r}")
        if header["version"] != _VERSION:
            raise ValueError(f"{path}: found version {header['version']}, expected {_VERSION}")
        return Trace(header["settings"], [TraceCall(**json.loads(line)) for line in file])

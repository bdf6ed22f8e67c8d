"""Measurements that are kept in a folder, so that a stopped study goes on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["measured_once", "measured_path"]


def measured_path(folder: Path, about: Any) -> Path:
    """Return the file of a measurement; without it, ``measured_once`` measures again."""
    text = json.dumps(about, sort_keys=True)
    return folder / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"


def measured_once(folder: Path, about: Any, measure: Callable[[], Any]) -> Any:
    """Return what was measured now or earlier, as JSON types.

    Args:
        folder: Folder with a file for each measurement.
        about: All that the result depends on, as JSON types.
        measure: Function that measures.
    """
    path = measured_path(folder, about)
    if not path.exists():
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(measure()), encoding="utf-8")
        partial.replace(path)
    return json.loads(path.read_text(encoding="utf-8"))

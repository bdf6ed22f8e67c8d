"""Measurements that are kept in a folder, so that a stopped study goes on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["measured_once"]


def measured_once(folder: Path, about: Any, measure: Callable[[], Any]) -> Any:
    """Return what was measured now or earlier, as JSON types.

    Args:
        folder: Folder with a file for each measurement.
        about: All that the result depends on, as JSON types.
        measure: Function that measures.
    """
    text = json.dumps(about, sort_keys=True)
    path = folder / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"
    if not path.exists():
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(measure()), encoding="utf-8")
        partial.replace(path)
    return json.loads(path.read_text(encoding="utf-8"))

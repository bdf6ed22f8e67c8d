"""Parse untrusted JSON; the only error is ``ValueError``."""

from __future__ import annotations

import json
import math
from typing import Any

__all__ = ["parse_json"]


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: The text is no JSON, is nested too deeply, or has numbers that are not finite.
    """
    try:
        return json.loads(text, parse_float=_finite, parse_constant=_finite)
    except RecursionError as error:
        raise ValueError("JSON is nested too deeply") from error


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"JSON has the number {text[:40]}, expected a finite one")
    return number

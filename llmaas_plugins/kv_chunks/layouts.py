"""Layouts of cells as a store keeps them: JSON with a checksum, since SQLite has none."""

from __future__ import annotations

import hashlib
import json

from llmaas_plugins._native import KVGeometry
from llmaas_plugins.json_text import parse_json

__all__ = ["pack_layout", "unpack_layout"]

_SUM = "sum"


def pack_layout(geometry: KVGeometry) -> str:
    """Return a layout as text."""
    values = geometry.to_json()
    return json.dumps({**values, _SUM: _sum(values)})


def unpack_layout(text: str) -> KVGeometry:
    """Return the layout that ``pack_layout`` made a text of.

    Raises:
        ValueError: It is something else, or damaged.
    """
    values = parse_json(text)
    if not isinstance(values, dict) or values.pop(_SUM, None) != _sum(values):
        raise ValueError("found another checksum than that of the layout")
    try:
        return KVGeometry.from_json(values)
    except OverflowError as error:
        raise ValueError(str(error)) from error


def _sum(values: object) -> str:
    text = json.dumps(values, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

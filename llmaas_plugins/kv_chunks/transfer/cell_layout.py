"""Stored form of cell layouts: JSON with a checksum, because SQLite has no checksums."""

from __future__ import annotations

import hashlib
import json

from llmaas_plugins._native import KVGeometry
from llmaas_plugins.files.json_text import parse_json

__all__ = ["pack_layout", "unpack_layout"]

_SUM = "sum"


def pack_layout(geometry: KVGeometry) -> str:
    """Return a layout as JSON text with a checksum."""
    values = geometry.to_json()
    return json.dumps({**values, _SUM: _sum(values)})


def unpack_layout(text: str) -> KVGeometry:
    """Parse the text that ``pack_layout`` returned.

    Raises:
        ValueError: The text is not a layout, or it is damaged.
    """
    values = parse_json(text)
    if not isinstance(values, dict) or values.pop(_SUM, None) != _sum(values):
        raise ValueError("the layout's checksum is wrong")
    try:
        return KVGeometry.from_json(values)
    except OverflowError as error:
        raise ValueError(str(error)) from error


def _sum(values: object) -> str:
    text = json.dumps(values, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

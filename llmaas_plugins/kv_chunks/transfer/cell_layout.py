"""Layout of an engine's cells: measured, and stored as JSON for later processes.

The JSON has a checksum, because SQLite has none.
"""

from __future__ import annotations

import hashlib
import json
import logging

import numpy as np

from llmaas_plugins import _native
from llmaas_plugins._native import KVGeometry
from llmaas_plugins.failure_log import FailureLog
from llmaas_plugins.files.json_text import parse_json
from llmaas_plugins.kv_chunks.store.chunk_store import ChunkStore
from llmaas_plugins.kv_chunks.transfer.cells import KVCells

__all__ = ["CellLayout", "pack_layout", "unpack_layout"]

_SUM = "sum"
_log = logging.getLogger("llmaas.kv_chunks")


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


class CellLayout:
    """Layout of one engine's cells.

    Attributes:
        geometry: Layout in use; None while it is unknown.
        is_measured: Whether the layout was measured here, not only stored by an earlier process.
    """

    def __init__(self, store: ChunkStore, cells: KVCells) -> None:
        """Start without a layout."""
        self._store = store
        self._cells = cells
        self._failures = FailureLog(_log, logging.WARNING)
        self.geometry: KVGeometry | None = None
        self.is_measured = False

    def find(self, root: bytes) -> KVGeometry | None:
        """Return the layout in use, else the one stored under ``root``, else None."""
        return self.geometry or self._stored(root)

    def use(self, geometry: KVGeometry) -> None:
        """Use a layout that ``find`` returned, as the buffers for it fit the budget."""
        self.geometry = geometry
        self._failures.worked()

    def reject(self) -> None:
        """Log that the buffers for a stored layout do not fit the budget."""
        self._failures.failed("the stored layout of this model's cells needs too much memory")

    def measure(self, root: bytes) -> KVGeometry:
        """Read the cells' layout from the blob of one cell, and store it under ``root``."""
        if self.geometry is None or not self.is_measured:
            blob = np.empty(self._cells.size(0, 1), dtype=np.uint8)
            self._cells.read(0, 1, blob)
            geometry, _ = _native.blob_probe(blob)
            if geometry != self.geometry:
                self.geometry = geometry
            self.is_measured = True
        layout = pack_layout(self.geometry)
        if self._store.layout(root) != layout:
            self._store.set_layout(root, layout)
        return self.geometry

    def _stored(self, root: bytes) -> KVGeometry | None:
        layout = self._store.layout(root)
        try:
            return None if layout is None else unpack_layout(layout)
        except ValueError as error:
            self._failures.failed("the stored layout of this model's cells is invalid: %s", error)
            return None

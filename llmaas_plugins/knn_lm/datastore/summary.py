"""The pairs that are selected, read without the arrays that a search needs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from llmaas_plugins.knn_lm.archive.files import SELECTED
from llmaas_plugins.knn_lm.datastore.file import DatastoreFile
from llmaas_plugins.knn_lm.datastore.metadata import DatastoreMetadata

__all__ = ["DatastoreSummary", "read_summary"]


@dataclass(frozen=True, slots=True, eq=False)
class DatastoreSummary:
    """The pairs of a selected datastore, without their keys.

    Attributes:
        fingerprint: Fingerprint of the model that the pairs are for.
        n_bytes: Length of the file.
        settings: Settings that were fitted with the selection.
        positions: For each conversation's id, positions of its pairs' targets in its tokens.
    """

    fingerprint: bytes
    n_bytes: int
    settings: Mapping[str, Any]
    positions: Mapping[str, npt.NDArray[np.int32]]

    @property
    def n_pairs(self) -> int:
        """Number of pairs."""
        return sum(map(len, self.positions.values()))

    def positions_in(self, id_: str) -> npt.NDArray[np.int32]:
        """Return the positions in one conversation, ascending; empty if it has no pairs here."""
        return np.sort(self.positions.get(id_, np.empty(0, np.int32)))


def read_summary(directory: Path) -> DatastoreSummary | None:
    """Return the selected pairs of a datastore's directory, or None if none were ever selected.

    Raises:
        StoreError: The file cannot be read, or is damaged.
    """
    path = directory / SELECTED
    if not os.path.lexists(path):
        return None
    file = DatastoreFile(path)
    try:
        metadata = DatastoreMetadata.read(file)
        origins = file.read("origins")
        n_bytes = os.fstat(file.fd).st_size
    finally:
        file.close()
    order = np.argsort(origins[:, 0], kind="stable")
    edges = np.searchsorted(origins[order, 0], np.arange(1, len(metadata.conversations)))
    parts = np.split(origins[order, 1], edges)
    positions = dict(zip(metadata.conversations, parts, strict=False))
    return DatastoreSummary(file.fingerprint, n_bytes, metadata.settings, positions)

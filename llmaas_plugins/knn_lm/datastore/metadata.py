"""Names and settings that a selected datastore stores as JSON beside its arrays."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from llmaas_plugins.files.json_text import parse_json
from llmaas_plugins.knn_lm.datastore.file import DatastoreFile, damaged
from llmaas_plugins.knn_lm.datastore.recall import MOST_ROWS

__all__ = ["DatastoreMetadata"]

_RENAMED = {"rows_per_neighbour": "rows_per_neighbor"}
"""Names in earlier files, and today's."""


class DatastoreMetadata(NamedTuple):
    """Names and settings.

    Attributes:
        conversations: Ids of the conversations that the pairs come from.
        settings: JSON values that the writer was given.
        rows_per_neighbor: Rows that a scan must return for each neighbor.
        owners: For each conversation, the only app that may use it, or None if all apps may. Empty
            in a datastore of an older version, which all apps may use.
    """

    conversations: tuple[str, ...]
    settings: Mapping[str, Any]
    rows_per_neighbor: float
    owners: tuple[str | None, ...] = ()

    def without(self, kept: Sequence[int]) -> DatastoreMetadata:
        """Return the names and settings that remain when only these conversations are kept."""
        names = tuple(self.conversations[i] for i in kept)
        owners = tuple(self.owners[i] for i in kept) if self.owners else ()
        return self._replace(conversations=names, owners=owners)

    def encoded(self) -> bytes:
        """Return the names and settings as JSON."""
        return json.dumps(self._asdict(), allow_nan=False).encode()

    @classmethod
    def read(cls, file: DatastoreFile) -> DatastoreMetadata:
        """Read the names and settings and verify them.

        Raises:
            StoreError: The JSON is damaged, or not what a writer of this version writes.
        """
        try:
            fields = parse_json(file.read("text").tobytes())
            metadata = cls(**{_RENAMED.get(name, name): fields[name] for name in fields})
            is_sound = (
                all(isinstance(name, str) for name in metadata.conversations)
                and isinstance(metadata.settings, dict)
                and len(metadata.owners) in (0, len(metadata.conversations))
                and all(owner is None or isinstance(owner, str) for owner in metadata.owners)
                and 1 <= metadata.rows_per_neighbor <= MOST_ROWS
            )
        except (ValueError, TypeError):
            is_sound = False
        if not is_sound:
            raise damaged(
                file.path, "names and settings in another form", "those that were written"
            )
        names, owners = tuple(metadata.conversations), tuple(metadata.owners)
        return metadata._replace(conversations=names, owners=owners)

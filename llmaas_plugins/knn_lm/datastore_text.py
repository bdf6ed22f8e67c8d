"""What a selected datastore holds besides arrays: names and settings, as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from llmaas_plugins.json_text import parse_json
from llmaas_plugins.knn_lm.datastore_file import DatastoreFile, damaged
from llmaas_plugins.knn_lm.recall import MOST_ROWS

__all__ = ["Text"]


class Text(NamedTuple):
    """Names and settings.

    Attributes:
        conversations: Ids of those that pairs are from.
        settings: Whatever was given.
        rows_per_neighbour: Rows that a scan is to return for each neighbour.
        owners: Of each conversation, the app that alone may be answered with it; None: all may be.
            An older datastore does not say, and is for all.
    """

    conversations: tuple[str, ...]
    settings: Mapping[str, Any]
    rows_per_neighbour: float
    owners: tuple[str | None, ...] = ()

    def without(self, kept: Sequence[int]) -> Text:
        """Return what is left when only these conversations are kept."""
        names = tuple(self.conversations[i] for i in kept)
        owners = tuple(self.owners[i] for i in kept) if self.owners else ()
        return self._replace(conversations=names, owners=owners)

    def encoded(self) -> bytes:
        """As JSON."""
        return json.dumps(self._asdict(), allow_nan=False).encode()

    @classmethod
    def read(cls, file: DatastoreFile) -> Text:
        """Read and check it.

        Raises:
            StoreError: It is damaged, or not what a writer of this version writes.
        """
        try:
            text = cls(**parse_json(file.read("text").tobytes()))
            is_sound = (
                all(isinstance(name, str) for name in text.conversations)
                and isinstance(text.settings, dict)
                and len(text.owners) in (0, len(text.conversations))
                and all(owner is None or isinstance(owner, str) for owner in text.owners)
                and 1 <= text.rows_per_neighbour <= MOST_ROWS
            )
        except (ValueError, TypeError):
            is_sound = False
        if not is_sound:
            raise damaged(
                file.path, "names and settings in another form", "those that were written"
            )
        return text._replace(conversations=tuple(text.conversations), owners=tuple(text.owners))

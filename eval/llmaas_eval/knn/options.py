"""Options of a figure's measurement."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from llmaas_eval.knn.keys import UserKeys, kept_keys
from llmaas_eval.knn.scoring import ScoringSettings

__all__ = ["SHARE", "Options"]

SHARE = 0.3
"""Kept pairs L as a share of the history's pairs; the paper keeps 1e5 of 2.5e5 to 4e5."""


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a figure.

    Attributes:
        data: Folder of the data sets.
        model: GGUF file.
        cache: Folder for users' computed pairs.
        users: Names of the users to measure.
        methods: Names of the methods in Table 2 and at equal size.
        scoring: Settings of each user's study.
        out: Folder for the results.
    """

    data: Path
    model: Path
    cache: Path
    users: Sequence[str]
    methods: Sequence[str]
    scoring: ScoringSettings
    out: Path

    def each(self) -> Iterator[UserKeys]:
        """Yield each user's pairs and show the progress."""
        for name in tqdm(self.users, unit="user", disable=None):
            yield self.user(name)

    def user(self, name: str) -> UserKeys:
        """Return a user's pairs."""
        return kept_keys(self.cache, self.data, self.model, name)

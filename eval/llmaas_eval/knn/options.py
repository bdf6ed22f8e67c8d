"""What a figure is asked to measure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from llmaas_eval.knn.keys import UserKeys, kept_keys
from llmaas_eval.knn.study import Plan

__all__ = ["SHARE", "Options"]

SHARE = 0.3
"""L over the pairs of the history: the paper's 1e5 of 2.5e5 to 4e5."""


@dataclass(frozen=True, slots=True)
class Options:
    """Of a figure.

    Attributes:
        data: Folder of the data sets.
        model: GGUF.
        cache: Folder where users' pairs are kept.
        users: Whose.
        methods: Of Table 2.
        plan: How they are studied.
        out: Folder for the results.
    """

    data: Path
    model: Path
    cache: Path
    users: Sequence[str]
    methods: Sequence[str]
    plan: Plan
    out: Path

    def each(self) -> Iterator[UserKeys]:
        """Each user's pairs; says how far it is."""
        for name in tqdm(self.users, unit="user", disable=None):
            yield self.user(name)

    def user(self, name: str) -> UserKeys:
        """A user's pairs."""
        return kept_keys(self.cache, self.data, self.model, name)

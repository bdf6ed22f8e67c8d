"""A user's pairs, computed once and kept in a folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llmaas_eval.knn.duplicates import without_duplicates
from llmaas_eval.knn.encoder import STATES, Encoder
from llmaas_eval.knn.users import load, split

__all__ = ["Part", "UserKeys", "as_part", "kept_keys"]


@dataclass(frozen=True, slots=True)
class Part:
    """Pairs of conversations, one conversation after the other.

    Attributes:
        ffn: Keys: what the last layer's feed-forward block reads; ``(n, n_embd)``.
        norm: Keys: what the output matrix reads; ``(n, n_embd)``.
        values: Next tokens; ``(n,)``.
        p: Probability that the model alone gives them.
        max: Largest probability of the model alone.
        conv: Number of the conversation that a pair is of.
    """

    ffn: NDArray[np.float16]
    norm: NDArray[np.float16]
    values: NDArray[np.int32]
    p: NDArray[np.float32]
    max: NDArray[np.float32]
    conv: NDArray[np.int32]

    def __len__(self) -> int:
        """Pairs."""
        return len(self.values)

    def rows(self, chosen: NDArray[np.intp] | NDArray[np.bool_]) -> Part:
        """Some of the pairs."""
        return Part(**{name: getattr(self, name)[chosen] for name in _COLUMNS})

    @classmethod
    def joined(cls, parts: Sequence[Part]) -> Part:
        """One after the other; conversations are counted on."""
        starts = np.cumsum([0, *(part.conv.max() + 1 for part in parts[:-1])])
        columns = {
            name: np.concatenate([getattr(part, name) for part in parts]) for name in _COLUMNS
        }
        moved = [part.conv + start for part, start in zip(parts, starts, strict=True)]
        return cls(**columns | {"conv": np.concatenate(moved).astype(np.int32)})


_COLUMNS = tuple(Part.__dataclass_fields__)


@dataclass(frozen=True, slots=True)
class UserKeys:
    """Both parts of a user's conversations."""

    name: str
    train: Part
    test: Part


def kept_keys(folder: Path, data: Path, model: Path, name: str) -> UserKeys:
    """The pairs of a user, from ``folder`` if they are there."""
    path = folder / f"{name}.npz"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        parts = without_duplicates(split(load(data, name), name))
        with Encoder(model) as encoder:
            train, test = (as_part(encoder, [chat.text for chat in part]) for part in parts)
            _write(path, train=train, test=test)
    with np.load(path) as stored:
        train, test = (
            Part(**{column: stored[f"{part}_{column}"] for column in _COLUMNS})
            for part in ("train", "test")
        )
    return UserKeys(name, train, test)


def as_part(encoder: Encoder, texts: Sequence[str]) -> Part:
    """Pairs of texts, each a conversation of its own."""
    encoded = [encoder.encode(encoder.tokens(text)) for text in texts]
    ffn, norm = (np.concatenate([some.keys[states] for some in encoded]) for states in STATES)
    values, p, largest = (
        np.concatenate(columns) for columns in zip(*(some[1:] for some in encoded), strict=True)
    )
    conv = np.repeat(np.arange(len(texts), dtype=np.int32), [len(e.values) for e in encoded])
    return Part(ffn, norm, values, p, largest, conv)


def _write(path: Path, **parts: Part) -> None:
    arrays = {
        f"{name}_{column}": getattr(part, column)
        for name, part in parts.items()
        for column in _COLUMNS
    }
    new = path.with_suffix(".new.npz")
    np.savez(new, **arrays)
    new.replace(path)

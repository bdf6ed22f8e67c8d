"""A user's context-target pairs, computed once and cached in a folder."""

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
    """Pairs of conversations, one conversation after another; all arrays have ``n`` rows.

    Attributes:
        ffn: Keys from the input of the last layer's feed-forward block; ``(n, n_embd)``.
        norm: Keys from the input of the output matrix; ``(n, n_embd)``.
        values: Next tokens; ``(n,)``.
        p: Probability of the next token from the model alone.
        max: Largest probability from the model alone.
        conv: Number of the pair's conversation, ascending.
    """

    ffn: NDArray[np.float16]
    norm: NDArray[np.float16]
    values: NDArray[np.int32]
    p: NDArray[np.float32]
    max: NDArray[np.float32]
    conv: NDArray[np.int32]

    def __len__(self) -> int:
        """Return the number of pairs."""
        return len(self.values)

    def rows(self, chosen: NDArray[np.intp] | NDArray[np.bool_]) -> Part:
        """Return the pairs at these row numbers, or where this mask is true."""
        return Part(**{name: getattr(self, name)[chosen] for name in _COLUMNS})

    @classmethod
    def joined(cls, parts: Sequence[Part]) -> Part:
        """Concatenate parts; conversation numbers continue from one part to the next."""
        starts = np.cumsum([0, *(part.conv.max() + 1 for part in parts[:-1])])
        columns = {
            name: np.concatenate([getattr(part, name) for part in parts]) for name in _COLUMNS
        }
        moved = [part.conv + start for part, start in zip(parts, starts, strict=True)]
        return cls(**columns | {"conv": np.concatenate(moved).astype(np.int32)})


_COLUMNS = tuple(Part.__dataclass_fields__)


@dataclass(frozen=True, slots=True)
class UserKeys:
    """The training and the test part of a user's conversations."""

    name: str
    train: Part
    test: Part


def kept_keys(folder: Path, data: Path, model: Path, name: str) -> UserKeys:
    """Return a user's pairs; compute them and write them to ``folder`` if they are not there."""
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
    """Encode texts, each as one conversation."""
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

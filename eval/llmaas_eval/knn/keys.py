"""A user's pairs, computed once and kept in a folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llmaas_eval.knn.duplicates import without_duplicates
from llmaas_eval.knn.encoder import STATES, Encoder
from llmaas_eval.knn.users import Chat, load, split

__all__ = ["Part", "UserKeys", "kept_keys"]


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
            _write(path, train=_encode(encoder, parts.train), test=_encode(encoder, parts.test))
    with np.load(path) as stored:
        train, test = (
            Part(**{column: stored[f"{part}_{column}"] for column in _COLUMNS})
            for part in ("train", "test")
        )
    return UserKeys(name, train, test)


def _encode(encoder: Encoder, chats: Sequence[Chat]) -> Part:
    encoded = [encoder.encode(encoder.tokens(chat.text)) for chat in chats]
    ffn, norm = (np.concatenate([some.keys[states] for some in encoded]) for states in STATES)
    values, p, largest = (
        np.concatenate(columns) for columns in zip(*(some[1:] for some in encoded), strict=True)
    )
    conv = np.repeat(np.arange(len(chats), dtype=np.int32), [len(e.values) for e in encoded])
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

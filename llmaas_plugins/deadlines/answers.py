"""Answers of each setting, compared with the whole model's to the whole prompt: the outcome table.

A setting is a pair of levels, and a share of the prompt. ``llmaas deadlines learn`` measures each
once for a prepared file. Answers are kept apart for each app whose prompts were given, beside those
of general text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from llmaas_hooks import ConfigError, Levels, StoreError
from llmaas_plugins.files.array_file import read_arrays, write_arrays

__all__ = [
    "DIRECTORY",
    "MOST_ANSWER",
    "MOST_REQUESTS",
    "MOST_SHARES",
    "Answers",
    "Shorter",
    "answers_path",
]

DIRECTORY = Path("~/.cache/llmaas/outcomes")
MOST_ANSWER = 64
"""Most tokens of an answer that are compared."""
MOST_REQUESTS = 100_000
MOST_SHARES = 8
"""Most shares of a prompt."""
_MOST_LEVELS = 64
_MOST_BYTES = 256 << 20
_FORMAT, _VERSION, _WHOLE_ONLY = "llmaas-outcomes", 2, 1
"""Files of the first version have answers to whole prompts only, as others may have."""
_LEARN = "`llmaas deadlines learn` makes a new one."


class Shorter(NamedTuple):
    """Answers to shorter prompts, which were read at some of the levels.

    Attributes:
        shares: Shares of a prompt's tokens, longest first; all below 1.
        levels: Levels, widest first.
        leads: How many leading tokens equal the whole model's to the whole prompt, by share,
            prefill and decode level: ``(n, n_shares, n_levels, n_levels)`` uint8.
        chosen_by: Name of how the words were chosen.
    """

    shares: tuple[float, ...]
    levels: tuple[float, ...]
    leads: NDArray[np.uint8]
    chosen_by: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Answers:
    """Answers to some requests. The whole model's answer is greedy.

    Attributes:
        levels: Levels, widest first; the first is the whole model.
        n_answer: Number of tokens of an answer that were compared.
        n_prompt: Number of tokens of each prompt; ``(n,)`` int32.
        leads: How many leading tokens equal the whole model's, by prefill and decode level:
            ``(n, n_levels, n_levels)`` uint8. If the whole answer does, it is ``n_answer``, even
            if the answer is shorter.
        margins: Log-probability of the first token minus that of the second most likely one, by
            prefill level; ``(n, n_levels)`` float32.
        shorter: Answers to shorter prompts; None if they were not measured.
    """

    levels: tuple[float, ...]
    n_answer: int
    n_prompt: NDArray[np.int32]
    leads: NDArray[np.uint8]
    margins: NDArray[np.float32]
    shorter: Shorter | None = None

    def __len__(self) -> int:
        """Return the number of requests."""
        return len(self.n_prompt)

    def some(self, rows: NDArray[np.intp] | slice) -> Answers:
        """Return the answers to some of the requests."""
        shorter = self.shorter and self.shorter._replace(leads=self.shorter.leads[rows])
        arrays = self.n_prompt[rows], self.leads[rows], self.margins[rows]
        return Answers(self.levels, self.n_answer, *arrays, shorter)

    def by(self, scorer: str) -> Answers:
        """Return the answers with the name of how the words of shorter prompts were chosen."""
        shorter = self.shorter and self.shorter._replace(chosen_by=scorer)
        return replace(self, shorter=shorter)

    def differ(self, n_tokens: int) -> NDArray[np.bool_]:
        """Return which answers to whole prompts differ in their first tokens; as ``leads``."""
        return self.leads < n_tokens

    def check(self) -> Self:
        """Return the answers if they are possible.

        Raises:
            ValueError: They are not.
        """
        n, n_levels = len(self.n_prompt), len(self.levels)
        _check_levels(self.levels)
        if not 1 <= self.n_answer <= MOST_ANSWER or not 1 <= n <= MOST_REQUESTS:
            raise ValueError(f"it has {n} answers of {self.n_answer} tokens")
        _check_array(self.n_prompt, (n,), np.int32)
        _check_array(self.leads, (n, n_levels, n_levels), np.uint8)
        _check_array(self.margins, (n, n_levels), np.float32)
        if self.shorter is not None:
            self._check_shorter(self.shorter)
        is_possible = self.n_prompt.min() > 0 and self.leads.max() <= self.n_answer
        if not (is_possible and np.isfinite(self.margins).all() and self.margins.min() >= 0):
            raise ValueError("its numbers are impossible")
        return self

    def _check_shorter(self, shorter: Shorter) -> None:
        shares, levels, leads, _ = shorter
        _check_levels(levels)
        if not set(levels) <= set(self.levels) or levels[-1] != self.levels[-1]:
            raise ValueError(f"its levels for shorter prompts are {levels}")
        for share in shares:
            Levels(prompt_share=share)  # raises an error that says which numbers are shares
        if not 1 <= len(shares) <= MOST_SHARES or not _falls((1.0, *shares)):
            raise ValueError(f"its shares are {shares}, expected them from long to short, below 1")
        _check_array(leads, (len(self), len(shares), len(levels), len(levels)), np.uint8)
        if leads.max() > self.n_answer:
            raise ValueError("its numbers are impossible")

    def save(self, path: Path, levels_id: str) -> None:
        """Write the answers to a file, replacing an existing one.

        Raises:
            StoreError: The file cannot be written.
        """
        about = _about(levels_id) | {"version": _VERSION}
        about |= {"levels": list(self.levels), "n_answer": self.n_answer}
        arrays: dict[str, NDArray[Any]] = {
            "n_prompt": self.n_prompt,
            "leads": self.leads,
            "margins": self.margins,
        }
        if self.shorter is not None:
            about |= {"shares": list(self.shorter.shares), "chosen_by": self.shorter.chosen_by}
            about |= {"levels_of_shares": list(self.shorter.levels)}
            arrays |= {_SHORTER: self.shorter.leads}
        write_arrays(path, about, arrays)

    @classmethod
    def load(cls, path: Path, levels_id: str) -> Self | None:
        """Read the answers that ``save`` wrote, or return None if there is no file.

        Raises:
            StoreError: The file cannot be read, is damaged, or belongs to other levels.
        """
        try:
            about, found = read_arrays(path, _MOST_BYTES)
            arrays: dict[str, Any] = found
            shorter = _shorter(about, arrays)
            return cls(*_checked(about, levels_id), **arrays, shorter=shorter).check()
        except StoreError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return None
            raise
        except (ValueError, TypeError, KeyError, ConfigError) as error:
            raise StoreError(f"{path} cannot be used: {error}. {_LEARN}") from error


def answers_path(levels_id: str, app: str | None) -> Path:
    """Return the path of a model's answers: to general text, or to an app's own prompts.

    Args:
        levels_id: Name of what the model's levels compute.
        app: Name of the app; None for general text.
    """
    name = levels_id if app is None else f"{levels_id}-{_hash(app)}"
    return DIRECTORY.expanduser() / f"{name}.npz"


# -- inside --------------------------------------------------------------------------------------


_SHORTER = "shorter_leads"
"""Name of the array of shorter prompts."""


def _about(levels_id: str) -> dict[str, Any]:
    return {"format": _FORMAT, "levels_id": levels_id}


def _checked(about: Mapping[str, Any], levels_id: str) -> tuple[tuple[float, ...], int]:
    """Return the levels of a file, and the number of tokens that were compared."""
    expected = _about(levels_id)
    if {name: about.get(name) for name in expected} != expected:
        raise ValueError("it belongs to another model")
    if about.get("version") not in (_WHOLE_ONLY, _VERSION):
        raise ValueError("it has another version")
    levels, n_answer = about["levels"], about["n_answer"]
    if not isinstance(levels, list) or type(n_answer) is not int:
        raise ValueError("its description is impossible")
    return tuple(levels), n_answer


def _shorter(about: Mapping[str, Any], arrays: dict[str, Any]) -> Shorter | None:
    """Take the answers to shorter prompts out of a file's arrays; None if there are none."""
    if _SHORTER not in arrays:
        return None
    shares, levels, chosen_by = about["shares"], about["levels_of_shares"], about["chosen_by"]
    if {type(shares), type(levels)} != {list} or not isinstance(chosen_by, str):
        raise ValueError("its description is impossible")
    return Shorter(tuple(shares), tuple(levels), arrays.pop(_SHORTER), chosen_by)


def _check_levels(levels: tuple[float, ...]) -> None:
    for level in levels:
        Levels(level)  # raises an error that says which numbers are levels
    if not 1 <= len(levels) <= _MOST_LEVELS or not _falls(levels):
        raise ValueError(f"its levels are {levels}, expected them from wide to narrow")


def _check_array(array: NDArray[Any], shape: tuple[int, ...], kind: type[np.generic]) -> None:
    if array.shape != shape or array.dtype != kind:
        raise ValueError(
            f"an array has the shape {array.shape} of {array.dtype}, expected {shape} of "
            f"{np.dtype(kind)}"
        )


def _falls(values: tuple[float, ...]) -> bool:
    """Return whether each value is smaller than the one before."""
    return all(value < before for before, value in pairwise(values))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]

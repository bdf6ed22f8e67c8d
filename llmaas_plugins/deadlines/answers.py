"""Answers of each pair of levels, compared with the whole model's: the outcome table.

``llmaas deadlines learn`` measures them once for a prepared file. They are kept apart for each app
whose prompts were given, beside those of general text.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from llmaas_hooks import ConfigError, Levels, StoreError
from llmaas_plugins.files.array_file import read_arrays, write_arrays

__all__ = ["DIRECTORY", "MOST_ANSWER", "MOST_REQUESTS", "Answers", "answers_path"]

DIRECTORY = Path("~/.cache/llmaas/outcomes")
MOST_ANSWER = 64
"""Most tokens of an answer that are compared."""
MOST_REQUESTS = 100_000
_MOST_LEVELS = 64
_MOST_BYTES = 256 << 20
_FORMAT, _VERSION = "llmaas-outcomes", 1
_LEARN = "`llmaas deadlines learn` makes a new one."


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
    """

    levels: tuple[float, ...]
    n_answer: int
    n_prompt: NDArray[np.int32]
    leads: NDArray[np.uint8]
    margins: NDArray[np.float32]

    def __len__(self) -> int:
        """Return the number of requests."""
        return len(self.n_prompt)

    def some(self, rows: NDArray[np.intp] | slice) -> Answers:
        """Return the answers to some of the requests."""
        return Answers(
            self.levels, self.n_answer, self.n_prompt[rows], self.leads[rows], self.margins[rows]
        )

    def differ(self, n_tokens: int) -> NDArray[np.bool_]:
        """Return which answers differ in their first tokens; ``(n, n_levels, n_levels)``."""
        return self.leads < n_tokens

    def check(self) -> Self:
        """Return the answers if they are possible.

        Raises:
            ValueError: They are not.
        """
        n, n_levels = len(self.n_prompt), len(self.levels)
        for level in self.levels:
            Levels(level)  # raises an error that says which numbers are levels
        if not 1 <= n_levels <= _MOST_LEVELS or list(self.levels) != sorted(
            set(self.levels), reverse=True
        ):
            raise ValueError(f"its levels are {self.levels}, expected them from wide to narrow")
        if not 1 <= self.n_answer <= MOST_ANSWER or not 1 <= n <= MOST_REQUESTS:
            raise ValueError(f"it has {n} answers of {self.n_answer} tokens")
        shapes = (n,), (n, n_levels, n_levels), (n, n_levels)
        kinds = np.int32, np.uint8, np.float32
        arrays: tuple[NDArray[Any], ...] = self.n_prompt, self.leads, self.margins
        for array, shape, kind in zip(arrays, shapes, kinds, strict=True):
            if array.shape != shape or array.dtype != kind:
                raise ValueError(
                    f"an array has the shape {array.shape} of {array.dtype}, expected {shape} of "
                    f"{np.dtype(kind)}"
                )
        is_possible = self.n_prompt.min() > 0 and self.leads.max() <= self.n_answer
        if not (is_possible and np.isfinite(self.margins).all() and self.margins.min() >= 0):
            raise ValueError("its numbers are impossible")
        return self

    def save(self, path: Path, levels_id: str) -> None:
        """Write the answers to a file, replacing an existing one.

        Raises:
            StoreError: The file cannot be written.
        """
        about = _about(levels_id) | {"levels": list(self.levels), "n_answer": self.n_answer}
        arrays: dict[str, NDArray[Any]] = {
            "n_prompt": self.n_prompt,
            "leads": self.leads,
            "margins": self.margins,
        }
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
            return cls(*_checked(about, levels_id), **arrays).check()
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


def _about(levels_id: str) -> dict[str, Any]:
    return {"format": _FORMAT, "version": _VERSION, "levels_id": levels_id}


def _checked(about: dict[str, Any], levels_id: str) -> tuple[tuple[float, ...], int]:
    """Return the levels of a file, and the number of tokens that were compared."""
    expected = _about(levels_id)
    if {name: about.get(name) for name in expected} != expected:
        raise ValueError("it belongs to another model, or has another version")
    levels, n_answer = about["levels"], about["n_answer"]
    if not isinstance(levels, list) or type(n_answer) is not int:
        raise ValueError("its description is impossible")
    return tuple(levels), n_answer


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]

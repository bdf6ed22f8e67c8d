"""Context-target pairs, of which a datastore consists."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["Pairs"]


@dataclass(frozen=True, slots=True, eq=False)
class Pairs:
    """Pairs of one or more conversations, one pair a row.

    Attributes:
        keys: Hidden states after the tokens before each target, shape (n, n_embd).
        values: Targets: the tokens that came next.
        p_lm: The model's own probability of each target.
        p_max: The model's largest probability of any token at that position.
    """

    keys: npt.NDArray[np.float16]
    values: npt.NDArray[np.int32]
    p_lm: npt.NDArray[np.float32]
    p_max: npt.NDArray[np.float32]

    def __post_init__(self) -> None:
        """Refuse arrays that do not fit together.

        Raises:
            ValueError: An array has a wrong shape or type.
        """
        _require("keys", self.keys, np.float16, (len(self.keys), self.keys.shape[-1]))
        for name, dtype in (("values", np.int32), ("p_lm", np.float32), ("p_max", np.float32)):
            _require(name, getattr(self, name), dtype, (len(self.keys),))

    def __len__(self) -> int:
        """Return the number of pairs."""
        return len(self.values)

    @property
    def n_embd(self) -> int:
        """Numbers in a key."""
        return int(self.keys.shape[1])


def _require(
    name: str, array: npt.NDArray[np.generic], dtype: type, shape: tuple[int, ...]
) -> None:
    if array.dtype != dtype or array.shape != shape:
        raise ValueError(
            f"{name}: found {array.dtype} of shape {array.shape}, "
            f"expected {np.dtype(dtype)} of shape {shape}"
        )

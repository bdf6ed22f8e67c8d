"""Drafts: tokens that a plugin proposes, and that the model verifies several at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["Drafter", "Guess", "Pick", "Proposal"]

Pick = Callable[[NDArray[np.float32]], tuple[int, bool]]
"""Function from logits, shape ``(n_vocab,)``, to the token to take, and whether to go on. It must
not change or keep the logits."""


class Guess(Protocol):
    """Function that lets the engine itself guess the next tokens, at a level of its weights."""

    def __call__(self, level: int, most: int, pick: Pick) -> list[int]:
        """Return up to ``most`` tokens that the engine says at a level.

        The tokens are evaluated one by one, after the cells of the text, and their cells are
        dropped again. No hook is called and no tap sees them. Without room for the cells, fewer
        tokens are returned. Call it only inside ``Proposal.make``.

        Args:
            level: Index of the level (``NativeContext.level``).
            most: Most tokens to return.
            pick: Function that chooses each token.

        Raises:
            RuntimeError: The engine could not evaluate a token.
        """


class Proposal(NamedTuple):
    """Draft that a drafter could make.

    Attributes:
        gain: Tokens that the draft is expected to give, its own one included, in the time that the
            model takes for one without drafts. Drafts of 1.0 and less are not made.
        make: Function that makes the draft, and returns its tokens.
    """

    gain: float
    make: Callable[[], Sequence[int]]


class Drafter(Protocol):
    """Source of drafts for one request.

    Attributes:
        most: Most tokens of a draft.
    """

    most: int

    def propose(self, tokens: NDArray[Any], seconds: Mapping[int, float]) -> Proposal | None:
        """Return the draft that could be made next, or None.

        Args:
            tokens: All tokens so far, int32 of shape ``(n,)``. Those since the last call tell how
                much of a draft was right, whichever drafter made it.
            seconds: Time that the model lately took for a batch, by the batch's number of tokens.
                Sizes that were not measured are missing.
        """

"""Contexts that were left stay in the engine, in cells beyond those that the app asked for.

A parked context is a sequence of its own; leaving and coming back are relabellings, no byte of the
cells is touched. Contexts that begin with the same tokens share the cells of that beginning, so
the cells in use are as many as the parked contexts have different beginnings. Contexts of different
roots, such as those of two apps, share nothing: how long one stays must not tell what another has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from llama_cpp import llama_cpp
from numpy.typing import NDArray

from llmaas_hooks import Engine, Tokens, common_prefix
from llmaas_plugins.kv_chunks.keys import CHUNK_TOKENS
from llmaas_plugins.kv_chunks.support import PARKED_SEQUENCES

__all__ = ["Parking", "Taken"]

_APP = 0
_END = -1


@dataclass(slots=True, eq=False)
class _Parked:
    """Tokens ``0 … n-1`` of a context, and the sequence that holds exactly their cells.

    Attributes:
        sequence: Its number.
        tokens: Shape ``(n,)``.
        cells: Which cells these are by layer, shape ``(n_layers, n)``; None if nobody knows.
        root: Where its chain of chunks begins.
    """

    sequence: int
    tokens: Tokens
    cells: NDArray[np.int32] | None
    root: bytes


class Taken(NamedTuple):
    """What sequence 0 was given.

    Attributes:
        n_tokens: Tokens.
        cells: Where they lie by layer, shape ``(n_layers, n_tokens)``; None if nobody knows.
    """

    n_tokens: int
    cells: NDArray[np.int32] | None


def _nearest(
    contexts: Sequence[_Parked], tokens: Tokens, root: bytes
) -> tuple[_Parked | None, int]:
    """Return the context of ``root`` that begins most like ``tokens``, and their common tokens."""
    found: _Parked | None = None
    n_most = 0
    for parked in contexts:
        n = common_prefix(parked.tokens, tokens) if parked.root == root else 0
        if n > n_most:
            found, n_most = parked, n
    return found, n_most


def _joined(
    first: NDArray[np.int32] | None, rest: NDArray[np.int32], n: int
) -> NDArray[np.int32] | None:
    """Cells of which the first ``n`` are another context's."""
    return None if first is None else np.concatenate([first[:, :n], rest[:, n:]], axis=1)


class Parking:
    """The parked contexts of one engine. Call it only while the engine is yours.

    Two rules hold between calls. Parked contexts use at most the engine's spare cells, so that
    sequence 0 always finds room for all that the app asked for. And where two of them have the
    same root and the same tokens from the beginning, they have the same cells.

    Attributes:
        limit: Cells that parked contexts may use after the next ``switch``.
    """

    def __init__(self, engine: Engine) -> None:
        """Attach to an engine, without keeping it."""
        self._memory = llama_cpp.llama_get_memory(engine.ctx)
        self.limit = engine.n_spare
        self._sequences = engine.parked
        self._contexts: list[_Parked] = []  # the one that was used last is the last
        self._is_expired = False
        self._n_cells = 0
        self._n_parked = self._n_taken = self._n_taken_tokens = self._n_given_up = 0

    def switch(
        self,
        prompt: Tokens,
        resident: Tokens,
        cells: Callable[[int], NDArray[np.int32] | None] = lambda _: None,
        root: bytes = b"",
        resident_root: bytes | None = None,
    ) -> Taken | None:
        """Keep what sequence 0 is about to lose, and bring back what the prompt goes on with.

        Args:
            prompt: The whole prompt, shape ``(n,)``.
            resident: What sequence 0 is known to hold from position 0, shape ``(m,)``.
            cells: Tells where its first tokens lie, if that is known.
            root: Where the prompt's chain of chunks begins. Contexts with another one stay parked.
            resident_root: Where the resident tokens' chain begins; ``root`` if None.

        Returns:
            The leading tokens of the prompt that sequence 0 holds now, and nothing else; or None
            if no parked context has more of them than sequence 0, which is as it was.
        """
        self._notice_given_up()
        if self._is_expired:
            self._is_expired = False
            self.give_up()
        resident_root = root if resident_root is None else resident_root
        n_common = common_prefix(resident, prompt) if resident_root == root else 0
        best, n_best = _nearest(self._contexts, prompt, root)
        if n_best <= n_common:
            best = None
        if best is not None:
            self._touch(best)
        if len(resident) - n_common >= CHUNK_TOKENS and len(resident) <= self.limit:
            self._park(resident, cells, resident_root)
        taken = None if best is None else self._take(best, n_best)
        self._make_room()
        return taken

    def expire(self) -> None:
        """Let the next ``switch`` begin with giving up all; any thread may ask for it."""
        self._is_expired = True

    def give_up(self) -> None:
        """Free all cells of parked contexts."""
        self._notice_given_up()
        for parked in tuple(self._contexts):
            self._remove(parked)
        self._n_cells = 0

    @property
    def n_cells(self) -> int:
        """Cells that parked contexts use."""
        return self._n_cells if self._sequences else 0

    def stats(self) -> dict[str, int]:
        """Counters, for the status."""
        return {
            "parked_contexts": len(self._sequences),
            "parked_cells": self.n_cells,
            "parks": self._n_parked,
            "takes": self._n_taken,
            "taken_tokens": self._n_taken_tokens,
            "parked_given_up": self._n_given_up,
        }

    # -- one context ----------------------------------------------------------------------------

    def _park(
        self, tokens: Tokens, where: Callable[[int], NDArray[np.int32] | None], root: bytes
    ) -> None:
        """Label the cells of sequence 0 as a parked context's too, if it is worth it."""
        if len(tokens) < CHUNK_TOKENS or not self._has_cells(len(tokens)):
            return
        for parked in [p for p in self._contexts if p.root == root]:
            n = common_prefix(parked.tokens, tokens)
            if n == len(tokens):
                self._touch(parked)
                return
            if n == len(parked.tokens):
                self._remove(parked)
        sequence = min(set(PARKED_SEQUENCES) - self._sequences)
        nearest, n_shared = _nearest(self._contexts, tokens, root)
        cells = where(len(tokens))
        if nearest is not None:
            self._label(nearest.sequence, sequence, 0, n_shared)
            if cells is not None:
                cells = _joined(nearest.cells, cells, n_shared)
        self._label(_APP, sequence, n_shared, len(tokens))
        self._sequences.add(sequence)
        self._contexts.append(_Parked(sequence, tokens, cells, root))
        self._n_parked += 1

    def _take(self, parked: _Parked, n: int) -> Taken:
        """Give sequence 0 the first ``n`` cells of a parked context, and nothing else.

        It stays parked if the prompt left a part of it aside.
        """
        self._drop(_APP, 0)
        self._label(parked.sequence, _APP, 0, n)
        if len(parked.tokens) - n < CHUNK_TOKENS:
            self._remove(parked)
        self._n_taken += 1
        self._n_taken_tokens += n
        return Taken(n, None if parked.cells is None else parked.cells[:, :n])

    def _touch(self, parked: _Parked) -> None:
        self._contexts.remove(parked)
        self._contexts.append(parked)

    def _remove(self, parked: _Parked) -> None:
        self._drop(parked.sequence, 0)
        self._sequences.discard(parked.sequence)
        self._contexts.remove(parked)

    # -- room -----------------------------------------------------------------------------------

    def _make_room(self) -> None:
        """Remove contexts, the least recently used first, until the rules hold again.

        A part of one would be worth little: what follows would have to be loaded into cells here
        and there. One sequence stays free, for the next context that is left.
        """
        while len(self._contexts) == len(PARKED_SEQUENCES) or self._count() > self.limit:
            self._remove(self._contexts[0])

    def _count(self) -> int:
        """Cells in use: of each context, those that no context before it has."""
        n_cells = 0
        for i, parked in enumerate(self._contexts):
            _, n_shared = _nearest(self._contexts[:i], parked.tokens, parked.root)
            n_cells += len(parked.tokens) - n_shared
        self._n_cells = n_cells
        return n_cells

    def _notice_given_up(self) -> None:
        """Forget the contexts whose cells the host had to free."""
        kept = [parked for parked in self._contexts if parked.sequence in self._sequences]
        self._n_given_up += len(self._contexts) - len(kept)
        self._contexts = kept

    # -- the engine -----------------------------------------------------------------------------

    def _has_cells(self, n: int) -> bool:
        first = llama_cpp.llama_memory_seq_pos_min(self._memory, _APP)
        return first == 0 and llama_cpp.llama_memory_seq_pos_max(self._memory, _APP) >= n - 1

    def _label(self, source: int, target: int, start: int, end: int) -> None:
        if start < end:
            llama_cpp.llama_memory_seq_cp(self._memory, source, target, start, end)

    def _drop(self, sequence: int, start: int) -> None:
        llama_cpp.llama_memory_seq_rm(self._memory, sequence, start, _END)

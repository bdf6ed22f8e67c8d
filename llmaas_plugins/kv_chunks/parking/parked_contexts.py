"""Keep inactive contexts in the engine, in cells that its requests do not need.

A parked context is a sequence of its own. Parking and resuming it only relabels cells, without
reading or writing them. Most of that time goes into llama.cpp's tree of the cells of a sequence. So
a resumed context keeps its label beside that of sequence 0, and when it is left again, only its new
cells are labeled.

Contexts that share a prefix share the cells of that prefix, so each distinct prefix takes cells
once. Contexts with different roots, such as those of two apps, share nothing, so that eviction
times do not reveal one app's tokens to another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from llama_cpp import llama_cpp

from llmaas_hooks import Engine, Tokens, common_prefix
from llmaas_plugins.kv_chunks.compression.attention import AsideAttention
from llmaas_plugins.kv_chunks.parking.sequences import PARKED_SEQUENCES, SCRATCH_SEQUENCE
from llmaas_plugins.kv_chunks.store.chunk_ids import CHUNK_TOKENS

__all__ = ["ParkedContexts", "ResumedContext"]

_APP_SEQUENCE = 0
_TO_END = -1


@dataclass(slots=True, eq=False)
class _ParkedContext:
    """A parked context: tokens ``0 … n-1`` and the sequence that holds exactly their cells.

    Attributes:
        sequence: Number of the sequence.
        tokens: Token ids, shape ``(n,)``.
        attention: Attention of the tokens, and their cells; None if it is not measured.
        root: Root of the context's chain of chunks.
        n_unused: Number of cells that its sequence has beyond the tokens' (``extend``).
    """

    sequence: int
    tokens: Tokens
    attention: AsideAttention | None
    root: bytes
    n_unused: int = 0


class ResumedContext(NamedTuple):
    """Tokens of a parked context that sequence 0 holds now.

    Attributes:
        n_tokens: Number of tokens.
        attention: Their attention, and their cells; None if it is not measured.
    """

    n_tokens: int
    attention: AsideAttention | None


def _nearest(
    contexts: Sequence[_ParkedContext], tokens: Tokens, root: bytes
) -> tuple[_ParkedContext | None, int]:
    """Return the context of ``root`` with the longest common prefix, and that prefix's length."""
    found: _ParkedContext | None = None
    n_most = 0
    for parked in contexts:
        n = common_prefix(parked.tokens, tokens) if parked.root == root else 0
        if n > n_most:
            found, n_most = parked, n
    return found, n_most


def _with_cells_of(
    attention: AsideAttention, other: AsideAttention | None, n: int
) -> AsideAttention:
    """Return attention of tokens of which another context has the cells of the first ``n``."""
    if attention.cells is None:
        return attention
    first = None if other is None else other.cells
    if first is None:
        return attention._replace(cells=None)
    joined = np.concatenate([first[:, :n], attention.cells[:, n:]], axis=1)
    return attention._replace(cells=joined)


class ParkedContexts:
    """The parked contexts of one engine. Use it only while no other thread uses the engine.

    Two invariants hold after each ``switch``. Parked contexts use at most ``limit`` cells. With
    spare cells, sequence 0 has as many beside them as the app asked for; without, it has room for
    the prompt and for the beginning of an answer, and the host frees parked contexts before it
    needs more. Parked contexts with the same root share the cells of their common prefix.

    Ctrl-C may end a call between any two steps. A sequence is therefore in ``engine.parked`` before
    it has cells and until it has none, and a context is listed only while its sequence is complete.
    The next call frees the sequences that no context lists. A context that keeps its label in
    sequence 0 counts as left there, not as parked: the host takes the label from cells that change.

    Attributes:
        limit: Cells that parked contexts may use after the next ``switch``.
    """

    def __init__(
        self, engine: Engine, *, only_interrupted: bool = False, only_whole: bool = False
    ) -> None:
        """Attach to an engine without keeping a reference to it.

        Args:
            engine: Engine that has the cells.
            only_interrupted: Whether only contexts of interrupted requests are parked.
            only_whole: Whether contexts are resumed only by prompts that begin with all of their
                tokens, so that the cells after a part of one are not scattered.
        """
        self._memory = llama_cpp.llama_get_memory(engine.ctx)
        self._only_interrupted, self._only_whole = only_interrupted, only_whole
        self.limit = engine.n_spare
        self._sequences = engine.parked
        self._contexts: list[_ParkedContext] = []  # least recently used first
        self._current: _ParkedContext | None = None  # resumed: sequence 0 begins with its cells
        self._is_expired = False
        self._counted: tuple[list[_ParkedContext], int] = [], 0  # contexts, and their cells
        self._n_parked = self._n_resumed = self._n_resumed_tokens = self._n_freed = 0

    def switch(  # noqa: PLR0913  two contexts
        self,
        prompt: Tokens,
        resident: Tokens,
        put_aside: Callable[[int], AsideAttention | None] = lambda _: None,
        root: bytes = b"",
        resident_root: bytes | None = None,
        *,
        is_interrupted: bool = False,
    ) -> ResumedContext | None:
        """Park the context in sequence 0, and resume the parked context that best fits the prompt.

        Args:
            prompt: The whole prompt, shape ``(n,)``.
            resident: Tokens that sequence 0 is known to hold from position 0, shape ``(m,)``.
            put_aside: Function that returns the attention of sequence 0's first tokens, or None. It
                is called only if these are parked.
            root: Root of the prompt's chain of chunks. Contexts with another root stay parked.
            resident_root: Root of the resident tokens' chain; None means ``root``.
            is_interrupted: Whether the resident tokens are of a request that will go on.

        Returns:
            The leading tokens of the prompt, which sequence 0 now holds and nothing else. None if
            no parked context has more of them than sequence 0, which is then unchanged.
        """
        self._forget_lost()
        if self._is_expired:
            self._is_expired = False
            self.clear()
        resident_root = root if resident_root is None else resident_root
        n_common = common_prefix(resident, prompt) if resident_root == root else 0
        best, n_best = _nearest(self._contexts, prompt, root)
        if n_best <= n_common or (self._only_whole and best and n_best < len(best.tokens)):
            best = None
        if best is not None:
            self._touch(best)
        n_shared = 0 if best is None else min(n_common, self._n_labeled(resident, root))
        n_least = 1 if is_interrupted else CHUNK_TOKENS
        is_wanted = is_interrupted or not self._only_interrupted
        if is_wanted and len(resident) - n_common >= n_least and len(resident) <= self.limit:
            self._park(resident, put_aside, resident_root)
        resumed = None
        if best is not None:
            self._drop_current()
            resumed = self._resume(best, n_best, n_shared)  # those cells are in both
        self._evict_over_limit()
        return resumed

    def extend(self, positions: range) -> None:
        """Give the scratch sequence's cells, which nothing uses, to the last parked context.

        Args:
            positions: Their positions, after the context's own.
        """
        parked = self._contexts[-1]
        self._label(SCRATCH_SEQUENCE, parked.sequence, positions.start, positions.stop)
        self._drop(SCRATCH_SEQUENCE, 0)
        self._contexts[-1] = replace(parked, n_unused=len(positions))
        self._count()

    def clear_later(self) -> None:
        """Make the next ``switch`` free all parked contexts first. Callable from any thread."""
        self._is_expired = True

    def clear(self) -> None:
        """Free all parked contexts."""
        self._forget_lost()
        self._drop_current()
        for parked in tuple(self._contexts):
            self._remove(parked)
        self._count()

    def n_parked(self, tokens: Tokens, root: bytes) -> int:
        """Return how many of the first tokens a parked context holds. Callable from any thread."""
        kept = [parked for parked in self._contexts if parked.sequence in self._sequences]
        return _nearest(kept, tokens, root)[1]

    @property
    def n_cells(self) -> int:
        """Number of cells that parked contexts use."""
        return self._counted[1] if self._sequences else 0

    @property
    def n_given_up(self) -> int:
        """Number of contexts whose cells the host freed."""
        return self._n_freed

    def stats(self) -> dict[str, int]:
        """Return counters for the plugin's status."""
        return {
            "parked_contexts": len(self._sequences.others()),
            "parked_cells": self.n_cells,
            "parks": self._n_parked,
            "takes": self._n_resumed,
            "taken_tokens": self._n_resumed_tokens,
            "parked_given_up": self._n_freed,
        }

    # -- one context ----------------------------------------------------------------------------

    def _park(
        self, tokens: Tokens, put_aside: Callable[[int], AsideAttention | None], root: bytes
    ) -> None:
        """Label sequence 0's cells as a parked context too, if it is long and not parked yet.

        A context that was resumed has that label already, but for its new cells.
        """
        if len(tokens) < CHUNK_TOKENS or not self._has_cells(_APP_SEQUENCE, len(tokens)):
            return
        nearest: _ParkedContext | None = None
        n_shared = 0
        for parked in [p for p in self._contexts if p.root == root]:
            n = common_prefix(parked.tokens, tokens)
            if n == len(tokens):
                self._touch(parked)
                return
            if n == len(parked.tokens):
                self._remove(parked)
            elif n > n_shared:
                nearest, n_shared = parked, n
        n_labeled = self._n_labeled(tokens, root)
        sequence = self._take_label() if n_labeled else self._new_label()
        if sequence is None:  # an eviction was cut off; the next one is due
            return
        attention = put_aside(len(tokens))
        if nearest is not None and n_shared > n_labeled:
            self._label(nearest.sequence, sequence, n_labeled, n_shared)
            n_labeled = n_shared
            if attention is not None:
                attention = _with_cells_of(attention, nearest.attention, n_shared)
        self._label(_APP_SEQUENCE, sequence, n_labeled, len(tokens))
        self._contexts.append(_ParkedContext(sequence, tokens, attention, root))
        self._n_parked += 1

    def _resume(self, parked: _ParkedContext, n: int, n_there: int) -> ResumedContext:
        """Replace sequence 0, but for ``n_there`` cells, by the first ``n`` of a parked context.

        The context stays parked, with what was counted of its attention, if the prompt leaves at
        least a chunk of it unused.
        """
        attention = parked.attention
        self._drop(_APP_SEQUENCE, n_there)
        self._label(parked.sequence, _APP_SEQUENCE, n_there, n)
        if len(parked.tokens) - n < CHUNK_TOKENS:
            self._keep_label(parked, n)
        elif attention is not None:
            attention = attention._replace(taken=None)
        self._n_resumed += 1
        self._n_resumed_tokens += n
        return ResumedContext(n, attention)

    # -- the label of the context in sequence 0 --------------------------------------------------

    def _keep_label(self, parked: _ParkedContext, n: int) -> None:
        """Let a context, of which sequence 0 has the first ``n`` cells, keep the label of these."""
        self._contexts.remove(parked)
        self._drop(parked.sequence, n)
        self._set_current(_ParkedContext(parked.sequence, parked.tokens[:n], None, parked.root))

    def _n_labeled(self, tokens: Tokens, root: bytes) -> int:
        """Return how many of sequence 0's tokens have a label that they can keep."""
        current = self._current
        if current is None or current.root != root:
            return 0
        n = len(current.tokens)
        return n if np.array_equal(current.tokens, tokens[:n]) else 0

    def _take_label(self) -> int | None:
        """Return the sequence that labels sequence 0's first cells; from now on it is apart."""
        current = self._current
        self._set_current(None)
        return None if current is None else current.sequence

    def _new_label(self) -> int | None:
        """Return an empty sequence, or None if there is none."""
        self._drop_current()
        unused = set(PARKED_SEQUENCES) - self._sequences
        if not unused:
            return None
        sequence = min(unused)
        self._sequences.add(sequence)
        self._drop(sequence, 0)
        return sequence

    def _drop_current(self) -> None:
        """Leave the cells of sequence 0 with that label alone."""
        current = self._current
        self._set_current(None)
        if current is not None:
            self._free(current.sequence)

    def _set_current(self, current: _ParkedContext | None) -> None:
        self._sequences.n_current = 0 if current is None else len(current.tokens)
        self._sequences.current = None if current is None else current.sequence
        self._current = current

    def _find_current(self) -> None:
        """Look which cells the host left with the label of the context in sequence 0."""
        current, sequence = self._current, self._sequences.current
        if current is None or current.sequence != sequence or sequence not in self._sequences:
            self._set_current(None)
            return
        n = self._end(current.sequence)
        current.tokens = current.tokens[:n]
        if not n:
            self._drop_current()

    def _touch(self, parked: _ParkedContext) -> None:
        self._contexts.remove(parked)
        self._contexts.append(parked)

    def _remove(self, parked: _ParkedContext) -> None:
        self._contexts.remove(parked)
        self._free(parked.sequence)

    def _free(self, sequence: int) -> None:
        self._drop(sequence, 0)
        self._sequences.discard(sequence)

    # -- space ----------------------------------------------------------------------------------

    def _evict_over_limit(self) -> None:
        """Remove contexts, least recently used first, until the invariants hold again.

        Contexts are removed whole: keeping a part is worth little, because the rest would have to
        be loaded into scattered cells. One sequence stays free for the next context to park.
        """
        while len(self._contexts) == len(PARKED_SEQUENCES) or self._count() > self.limit:
            self._remove(self._contexts[0])

    def _count(self) -> int:
        """Count the cells in use; a cell that several contexts share counts once."""
        contexts, n_cells = self._counted
        if contexts == self._contexts:
            return n_cells
        n_cells = 0
        for i, parked in enumerate(self._contexts):
            _, n_shared = _nearest(self._contexts[:i], parked.tokens, parked.root)
            n_cells += len(parked.tokens) - n_shared + parked.n_unused
        self._counted = self._contexts.copy(), n_cells
        return n_cells

    def _forget_lost(self) -> None:
        """Forget contexts whose cells the host freed, and free cells that no context lists."""
        kept = [
            parked
            for parked in self._contexts
            if parked.sequence in self._sequences
            and self._end(parked.sequence) >= len(parked.tokens)  # the host frees it as a whole
        ]
        self._n_freed += len(self._contexts) - len(kept)
        self._contexts = kept
        self._find_current()
        for sequence in self._sequences.others().difference(parked.sequence for parked in kept):
            self._free(sequence)

    # -- the engine -----------------------------------------------------------------------------

    def _has_cells(self, sequence: int, n: int) -> bool:
        first = llama_cpp.llama_memory_seq_pos_min(self._memory, sequence)
        return first == 0 and self._end(sequence) >= n

    def _end(self, sequence: int) -> int:
        return int(llama_cpp.llama_memory_seq_pos_max(self._memory, sequence)) + 1

    def _label(self, source: int, target: int, start: int, end: int) -> None:
        if start < end:
            llama_cpp.llama_memory_seq_cp(self._memory, source, target, start, end)

    def _drop(self, sequence: int, start: int) -> None:
        if self._end(sequence) > start:  # else a slow walk
            llama_cpp.llama_memory_seq_rm(self._memory, sequence, start, _TO_END)

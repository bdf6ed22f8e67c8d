"""Move chunks between the store and one engine: swap-out ahead of time, and loading."""

from __future__ import annotations

import dataclasses
import functools
import time
import weakref
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from llama_cpp import llama_cpp

from llmaas_hooks import Engine, Request, RequestCost, Tokens, common_prefix
from llmaas_plugins import process_memory
from llmaas_plugins.kv_chunks.compression.attention import AsideAttention
from llmaas_plugins.kv_chunks.compression.bit_allocator import AttentionSums
from llmaas_plugins.kv_chunks.parking.sequences import lie_aside
from llmaas_plugins.kv_chunks.store.chunk_ids import CHUNK_TOKENS, chain, chunk_key
from llmaas_plugins.kv_chunks.store.tree import PrefixMatch
from llmaas_plugins.kv_chunks.transfer.cell_layout import CellLayout
from llmaas_plugins.kv_chunks.transfer.cell_loader import CellLoader, LoadResult
from llmaas_plugins.kv_chunks.transfer.cells import KVCells
from llmaas_plugins.kv_chunks.transfer.chunk_saver import ChunkSaver
from llmaas_plugins.kv_chunks.transfer.cost_profile import CostProfile
from llmaas_plugins.kv_chunks.transfer.interruptions import Interruptions
from llmaas_plugins.kv_chunks.transfer.parts import TransferParts
from llmaas_plugins.model.cell_sizes import CELL_STEP

__all__ = ["Transfer"]

_LEAST_GAIN = CHUNK_TOKENS // 2


class _Present(NamedTuple):
    """Tokens of a prompt that sequence 0 holds, before chunks are loaded.

    Attributes:
        n_common: Number of them that were there already.
        n_taken: Number of them that are a parked context's; None if none was resumed.
        is_emptied: Whether sequence 0 was emptied.
    """

    n_common: int
    n_taken: int | None
    is_emptied: bool


class Transfer:
    """Transfer of chunks between the store and one engine."""

    def __init__(
        self, engine: Engine, root: Callable[[str | None], bytes], parts: TransferParts
    ) -> None:
        """Attach to an engine.

        Args:
            engine: Engine that has the cells.
            root: Function from an app's name to the root of its chunk chains.
            parts: Components to work with.
        """
        self._root = root
        self._store = parts.store
        self._bit_allocator = parts.bit_allocator
        self._attention = parts.attention
        self._parking = parts.parking
        self._spare = parts.spare
        self._cells = KVCells(engine.ctx)
        self._layout = CellLayout(self._store, self._cells)
        memory = llama_cpp.llama_get_memory(engine.ctx)
        self._lie_aside = functools.partial(lie_aside, memory, engine.n_seq_max)
        n_threads = int(llama_cpp.llama_n_threads_batch(engine.ctx))
        self._profile_key = chunk_key(root(None), f"profile, {n_threads} threads".encode())
        self._profile = CostProfile(self._store.layout(self._profile_key))
        self._saver = ChunkSaver(engine, self._cells, self._layout, parts)
        self._loader = CellLoader(engine, self._cells, self._layout, self._profile, parts)
        self._aside: weakref.WeakKeyDictionary[Request, AsideAttention] = (
            weakref.WeakKeyDictionary()
        )
        self._interruptions = Interruptions(parts.parking, is_exact=parts.is_exact)
        self._is_exact, self._memory = parts.is_exact, parts.memory
        self._saved = parts.saved
        self._is_at_start = True  # if exact: sequence 0 has the first cells of all, in order
        self._wanted = range(0)  # chunks that the last request could use again
        self._owner = object()  # identifies this engine's working set
        weakref.finalize(self, self._store.space.close_owner, self._owner)

    # -- swap-out -------------------------------------------------------------------------------

    def save(self, tokens: Tokens, context_id: str | None, app: str | None) -> None:
        """Store the chunks of sequence 0 that are stored nowhere yet, and update all chunks' bits.

        Args:
            tokens: Tokens in the cells, shape ``(n,)``.
            context_id: Name of the persistent context that ends with them, or None.
            app: Name of the app that the tokens belong to, or None.

        Raises:
            BudgetError: The RAM budget is too small for this model; nothing was changed.
        """
        started = time.perf_counter()
        root = self._root(app)
        ids = chain(root, tokens)
        attention = self._take_attention(len(tokens))
        bits = None if self._bit_allocator is None else self._bit_allocator.choose(ids, attention)
        if context_id is not None:
            self._store.drop_replaced_tail(context_id, ids)
        self._saver.save(root, ids, len(tokens), bits, context_id)
        geometry = self._layout.geometry
        if self._bit_allocator is not None and bits is not None and geometry is not None:
            self._bit_allocator.apply(ids, bits, attention, geometry)
        self._store.compact()
        self._profile.learn()
        if process_memory.budget() is not None:
            self._store.record_use(ids, self._wanted, self._profile.miss_costs())
            self._wanted = range(0)
        self._store.touch(ids)
        self._store.lock_working_set(self._owner, self._store.find(ids))
        if context_id is not None:
            self._store.set_head(context_id, ids)
        if self._profile.has_unsaved_points:
            self._store.set_layout(self._profile_key, self._profile.to_json())
        self._saved(time.perf_counter() - started)

    def interrupt(self, tokens: Tokens, context_id: str | None, app: str | None) -> bool:
        """Note that a request is interrupted; return whether it need not be saved now.

        The arguments are those of ``save``.
        """
        n_saved = None
        if self._parking is not None and not self._lie_aside():
            n_saved = self._store.match(self._root(app), tokens).n_tokens
        return self._interruptions.begin(tokens, context_id, app, n_saved)

    def put_aside(self, request: Request, n_tokens: int) -> None:
        """Keep the attention of a request while the engine evaluates tokens of others, too."""
        if self._attention is not None:
            self._aside[request] = self._attention.put_aside(n_tokens)

    def bring_back(self, request: Request, n_tokens: int) -> None:
        """Go on with the attention of a request, whose cells are sequence 0's again."""
        aside = self._aside.pop(request, None)
        if self._attention is not None and aside is not None:
            self._attention.bring_back(aside, n_tokens)

    def _take_attention(self, n_tokens: int) -> AttentionSums:
        if self._attention is not None:
            return self._attention.take(n_tokens)
        n_chunks = -(-n_tokens // CHUNK_TOKENS)
        return np.zeros(n_chunks), np.zeros(n_chunks)

    # -- load -----------------------------------------------------------------------------------

    def cost(
        self, prompt: Tokens, resident: Tokens, app: str | None, resident_app: str | None
    ) -> RequestCost:
        """Predict what ``restore``, which has the same arguments, would restore; change nothing."""
        root = self._root(app)
        n_common = common_prefix(prompt, resident) if root == self._root(resident_app) else 0
        match = self._store.match(root, prompt)
        if not _is_worth_loading(match, n_common) or self._layout.find(root) is None:
            return RequestCost(n_common)
        planned = self._loader.plan(match, n_common)
        n_ready = match.n_tokens if planned.runs else n_common
        return RequestCost(n_ready, planned.seconds or 0.0 if planned.runs else 0.0)

    def restore(
        self, prompt: Tokens, resident: Tokens, app: str | None, resident_app: str | None
    ) -> LoadResult | None:
        """Load the longest parked or stored prefix of ``prompt``, if sequence 0 has less of it.

        Some tokens may be recomputed here, if that is faster or their chunks are lost.

        Args:
            prompt: The whole prompt, shape ``(n,)``.
            resident: Tokens in sequence 0, shape ``(m,)``.
            app: Name of the app that asks, or None.
            resident_app: Name of the app that the resident tokens belong to, or None.

        Raises:
            BudgetError: The RAM budget is too small for this model; nothing was changed.
        """
        started = time.perf_counter()
        root, resident_root = self._root(app), self._root(resident_app)
        present = self._make_place(prompt, resident, root, resident_root)
        n_taken, n_present = present.n_taken, present.n_taken or present.n_common
        self._wanted = range(n_present // CHUNK_TOKENS, len(prompt) // CHUNK_TOKENS)
        match = self._store.match(root, prompt)
        is_open = self._loader.open(root)
        self._store.lock_working_set(self._owner, match.path)
        loaded = None
        if is_open and _is_worth_loading(match, n_present):
            loaded = self._loader.load(match, prompt, n_present, started)
        if loaded is None and (n_taken is not None or present.is_emptied or app != resident_app):
            loaded = LoadResult(n_present, 0, 0, None, time.perf_counter() - started)
        if loaded is not None and n_taken is not None:
            n_loaded = min(loaded.n_loaded + n_taken - present.n_common, loaded.n_tokens)
            return dataclasses.replace(loaded, n_loaded=n_loaded)
        return loaded

    def _make_place(
        self, prompt: Tokens, resident: Tokens, root: bytes, resident_root: bytes
    ) -> _Present:
        """Park what is in sequence 0, and fill it with what the cells hold of ``prompt``."""
        is_emptied = self._balance(len(resident), len(prompt))
        if is_emptied:
            resident = resident[:0]
        is_own = root == resident_root
        n_common = common_prefix(prompt, resident) if is_own else 0
        is_interrupted = self._is_interrupted(resident, resident_root, n_common)
        is_at_start, self._is_at_start = self._is_at_start, False  # until it is known
        stays = is_interrupted and (is_at_start or not self._is_exact)
        n_taken = self._unpark(prompt, resident, root, resident_root, is_interrupted=stays)
        is_apart = self._is_exact and stays
        if is_interrupted and not stays and n_taken is None:
            self._clear_parked()
        # cells before those of sequence 0 are free, and would be used next
        is_scattered = self._is_exact and not (is_at_start or self._has_parked())
        if n_taken is None and (is_apart or is_scattered or not is_own):
            is_emptied, n_common = True, 0
            self._empty()
        if is_apart:
            self._align()
        if n_taken is not None or is_emptied:
            is_at_start = n_taken is not None or not self._has_parked()
        self._is_at_start = is_at_start
        return _Present(n_common, n_taken, is_emptied)

    def _balance(self, n_resident: int, n_prompt: int) -> bool:
        """Fit parked contexts to the available memory; return whether all cells were emptied."""
        if self._spare is None or not self._spare.balance(n_resident, n_prompt):
            return False
        if self._attention is not None:
            self._attention.announce(0, 0)
        return True

    def _empty(self) -> None:
        """Empty sequence 0, whose cells the next request cannot use."""
        if self._attention is not None:
            self._attention.announce(0, 0)
        self._cells.truncate(0)

    def close(self) -> None:
        """Free parked contexts and stop measuring attention. No other thread may use the engine."""
        self._clear_parked()
        if self._attention is not None:
            self._attention.close()

    def forget_parked(self) -> None:
        """Make the next request free all parked contexts first. Callable from any thread."""
        if self._parking is not None:
            self._parking.clear_later()

    def parked_stats(self) -> dict[str, int]:
        """Return counters of the parked contexts."""
        parking, spare = self._parking, self._spare
        return (parking.stats() if parking else {}) | (spare.stats() if spare else {})

    def held(
        self, root: bytes, tokens: Tokens, resident: Tokens, resident_app: str | None
    ) -> tuple[int, int]:
        """Return how many of the first tokens sequence 0 and a parked context hold.

        Callable from any thread; the arguments are those of ``restore``, but for the root.
        """
        is_own = root == self._root(resident_app)
        n_resident = common_prefix(tokens, resident) if is_own else 0
        return n_resident, 0 if self._parking is None else self._parking.n_parked(tokens, root)

    def _is_interrupted(self, resident: Tokens, root: bytes, n_common: int) -> bool:
        """Return whether the resident tokens are of an interrupted request that may be parked.

        If the next prompt leaves no room, a request that was to stay in the cells is saved first.

        Args:
            resident: Tokens in sequence 0.
            root: Root of their chain of chunks.
            n_common: Number of them that the next prompt begins with.
        """
        found, parking = self._interruptions.take(resident), self._parking
        if found is None or parking is None:
            return False
        if self._root(found.app) != root or n_common == len(resident):
            return False
        has_room = len(resident) <= parking.limit
        if not (has_room or found.is_saved):
            self.save(found.tokens, found.context_id, found.app)
        return has_room

    def _clear_parked(self) -> None:
        """Free what is parked, so that the next request begins with the first cells.

        The interrupted request that lies before another one may be over; and the other one cannot
        be parked with its bits.
        """
        if self._parking is not None:
            self._parking.clear()

    def _has_parked(self) -> bool:
        return self._parking is not None and self._parking.n_cells > 0

    def _align(self) -> None:
        """Let the next cells begin at a multiple of 256, after those of an interrupted request.

        Narrowed attention then adds up as in a context that has the cells for itself
        (docs/explanation/engine.md). If that is impossible, the interrupted request is restored.
        """
        parking, geometry = self._parking, self._layout.geometry
        if parking is None or not parking.n_cells:
            return
        unused = range(parking.n_cells, -(-parking.n_cells // CELL_STEP) * CELL_STEP)
        if not unused:
            return
        if geometry and self._memory and self._cells.label_scratch(self._memory, geometry, unused):
            parking.extend(unused)
        else:
            parking.clear()

    def _unpark(
        self,
        prompt: Tokens,
        resident: Tokens,
        root: bytes,
        resident_root: bytes,
        *,
        is_interrupted: bool,
    ) -> int | None:
        """Resume the best parked context; return its number of tokens, or None if there is none."""
        if self._parking is None:
            return None
        attention = self._attention

        def put_aside(n_tokens: int) -> AsideAttention | None:
            if attention is None:
                return None
            if is_interrupted:
                return attention.put_aside(n_tokens)
            return AsideAttention(None, attention.cells(n_tokens))

        resumed = self._parking.switch(
            prompt, resident, put_aside, root, resident_root, is_interrupted=is_interrupted
        )
        self._interruptions.switched(is_resumed=resumed is not None)
        if resumed is None:
            return None
        if attention is not None and resumed.attention is not None:
            attention.bring_back(resumed.attention, resumed.n_tokens)
        return resumed.n_tokens

    def evaluated(self, n_tokens: int, seconds: float) -> None:
        """Record the time of a batch that was evaluated at the end of sequence 0."""
        if n_tokens > 1:  # single tokens are decoding, not recompute
            self._profile.evaluated(n_tokens, self._cells.end() - n_tokens, seconds)


def _is_worth_loading(match: PrefixMatch, n_present: int) -> bool:
    """Return whether a load gains more than a few tokens.

    Evaluating a few takes next to no time. Nearly all prompts begin with the same token, and a
    lossy codec would change what every other token sees of it.
    """
    return match.n_tokens - n_present >= _LEAST_GAIN

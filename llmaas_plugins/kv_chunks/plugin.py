"""The kv_chunks plugin: hooks that swap contexts in and out."""

from __future__ import annotations

import contextlib
import functools
import logging
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from llama_cpp import llama_cpp

from llmaas_hooks import (
    BudgetError,
    ContextCreate,
    DecodeStep,
    Engine,
    KVRestored,
    MemoryClaim,
    ModelLoad,
    NativeContext,
    Request,
    RequestCost,
    RequestStats,
    StoreError,
    Tokens,
    forks,
    hookimpl,
)
from llmaas_plugins._native import Budget, Codec
from llmaas_plugins.failure_log import FailureLog
from llmaas_plugins.kv_chunks.compression.attention import ChunkAttention
from llmaas_plugins.kv_chunks.compression.bit_allocator import BitAllocator
from llmaas_plugins.kv_chunks.config import KVChunksConfig
from llmaas_plugins.kv_chunks.context_places import context_places
from llmaas_plugins.kv_chunks.context_records import ContextRecords, alteration
from llmaas_plugins.kv_chunks.eligibility import request_cells, why_unserved
from llmaas_plugins.kv_chunks.parking.parked_contexts import ParkedContexts
from llmaas_plugins.kv_chunks.parking.unused_cells import cells_for
from llmaas_plugins.kv_chunks.parking.wanted_cells import wanted_tokens
from llmaas_plugins.kv_chunks.plugin_counters import PluginCounters
from llmaas_plugins.kv_chunks.store.chunk_ids import CHUNK_TOKENS
from llmaas_plugins.kv_chunks.store.chunk_store import ChunkStore
from llmaas_plugins.kv_chunks.store.disk_store import DiskStore
from llmaas_plugins.kv_chunks.store.store_files import name_older
from llmaas_plugins.kv_chunks.store.tree import names_of
from llmaas_plugins.kv_chunks.transfer.parts import TransferParts
from llmaas_plugins.kv_chunks.transfer.pipeline import Workers
from llmaas_plugins.kv_chunks.transfer.staging import Staging
from llmaas_plugins.kv_chunks.transfer.transfer import Transfer
from llmaas_plugins.lazy import lazy
from llmaas_plugins.model.digest import begin_digest, changed_in_place
from llmaas_plugins.model.identity import hashed, is_rotation_off
from llmaas_plugins.signals import signals_wait

__all__ = ["KVChunks"]

_NAME = "kv_chunks"
_SMALL_SEGMENT_BYTES = 1 << 20
_IDENTIFY_S = 2.0
"""Seconds that an engine's first request waits at most for its model to be identified."""
_CODECS = {"tolerance": Codec.PLANES, "int8": Codec.INT8, "lossless": Codec.LOSSLESS}

_log = logging.getLogger("llmaas.kv_chunks")


class KVChunks:
    """Persistent contexts for every ``Llama`` of the process."""

    Config: ClassVar[type[KVChunksConfig]] = KVChunksConfig

    def __init__(self, config: KVChunksConfig) -> None:
        """Keep the settings; the store is opened with the first context that can be served."""
        self._config = config
        self._lock = forks.lock()
        self._transfers: weakref.WeakKeyDictionary[Engine, Transfer | None]
        self._transfers = weakref.WeakKeyDictionary()
        self._engines_waited: weakref.WeakSet[Engine] = weakref.WeakSet()
        self._transfers_by_ctx: weakref.WeakValueDictionary[int, Transfer]
        self._transfers_by_ctx = weakref.WeakValueDictionary()
        self._records = ContextRecords()
        self._natives: dict[int, NativeContext] = {}
        self._counters = PluginCounters()
        self._background_failures = FailureLog(_log)

    # -- hooks ----------------------------------------------------------------------------------

    @hookimpl
    def llmaas_context_create(self, create: ContextCreate) -> None:
        """Add the scratch sequence and spare cells to contexts that can be served."""
        if create.is_own:
            return
        reason, parks = why_unserved(create), False
        if reason is None:
            try:
                self._open()  # fail before the context exists
            except Exception:
                create.checks.append(self._context_check(create.load, "its store is not open"))
                raise
            n_parked = wanted_tokens(create, self._config)
            parks = request_cells(create, n_parked, self._config.codec)
            if create.load is not None:
                self._records.digests[create.load] = begin_digest(create.load.files)  # needed soon
        create.checks.append(self._context_check(create.load, reason, parks=parks))

    def _context_check(
        self, load: ModelLoad | None, reason: str | None, *, parks: bool = False
    ) -> Callable[[int], bool]:
        """Return a check that records whether a new context is served.

        The check returns False if only the new context's cells show that it cannot be served.
        """
        rotation_off = is_rotation_off()

        def made(ctx: int) -> bool:
            found = self._records.add(ctx, load, reason, rotation_off=rotation_off, parks=parks)
            if found is not None:
                self._log_refusal("a model" if load is None else load.path, found)
            return found == reason

        return made

    @hookimpl
    def llmaas_native_context(self, context: NativeContext) -> None:
        """Remember the native context; release the memory of all cells if there are spare ones."""
        self._natives[context.ctx] = context
        if self._records.has_others(context.ctx):
            context.narrow_attention = True  # skips the cells of parked contexts
            if context.cells().n > llama_cpp.llama_n_ctx(context.ctx):  # the app's own number
                context.cells().release()

    @hookimpl
    def llmaas_context_free(self, ctx: int) -> None:
        """Forget a context, because another one may get its address."""
        self._natives.pop(ctx, None)
        self._transfers_by_ctx.pop(ctx, None)
        self._records.forget(ctx)

    @hookimpl
    def llmaas_cost(self, request: Request) -> RequestCost | None:
        """Predict how much of the prompt can be restored, and how long that takes."""
        engine = request.engine
        transfer = self._transfer(engine)
        if transfer is None or _NAME in request.declined:
            return None
        resident = engine.resident_tokens()[: engine.n_explained]
        return transfer.cost(request.tokens, resident, request.app, engine.resident_app)

    @hookimpl
    def llmaas_kv_restore(self, request: Request) -> KVRestored | None:
        """Load the longest stored prefix of the prompt."""
        engine = request.engine
        transfer = self._transfer(engine)
        if transfer is None or _NAME in request.declined:
            return None
        engine.keeps_cells = True
        resident = engine.resident_tokens()[: engine.n_explained]
        try:
            restored = transfer.restore(request.tokens, resident, request.app, engine.resident_app)
        except BudgetError as error:
            self._stop_serving(request.engine, error)
            return None
        if restored is not None and restored.n_loaded + restored.n_recomputed:  # else: only dropped
            self._counters.restored(restored)
        return restored

    @hookimpl
    def llmaas_together(self, request: Request, n_tokens: int, begins: bool) -> None:
        """Keep what the attention tap counted: soon it sees tokens of several requests."""
        transfer = self._transfers_by_ctx.get(request.engine.ctx)
        if transfer is not None:
            (transfer.put_aside if begins else transfer.bring_back)(request, n_tokens)

    @hookimpl
    def llmaas_kv_save(self, request: Request, tokens: Tokens, is_over: bool) -> None:
        """Swap out new chunks after the caller has its reply (LLMS §3.4)."""
        engine, load = request.engine, request.engine.load
        transfer = None if engine.alteration is not None else self._identified(engine)
        if transfer is None or _NAME in request.declined or len(tokens) < CHUNK_TOKENS:
            return
        name = request.context_id
        if name is not None:
            name = names_of(name)[request.whole is not None]
        if not is_over and transfer.interrupt(tokens, name, request.app):
            return

        def swap_out() -> None:
            if load is not None and changed_in_place(load.files):
                return  # the next request reports it
            try:
                transfer.save(tokens, name, request.app)
            except BudgetError as error:
                self._stop_serving(engine, error)

        engine.defer(swap_out)

    @hookimpl
    def llmaas_kv_evict(self, context_id: str) -> int:
        """Delete a context from every tier."""
        for transfer in self._all_transfers():
            transfer.forget_parked()
        return self._open().evict_context(context_id)

    @hookimpl
    def llmaas_prefill(self, step: DecodeStep) -> None:
        """Measure what recomputing a prompt's tokens costs, not what a plugin evaluates beside."""
        transfer = self._transfers_by_ctx.get(step.ctx)
        if transfer is not None:
            self._counters.evaluated(step.n_tokens, step.seconds)
            transfer.evaluated(step.n_tokens, step.seconds)

    @hookimpl
    def llmaas_request_end(self, stats: RequestStats) -> None:
        """Count requests and the prompt tokens that they reused."""
        self._counters.request(stats)

    @hookimpl
    def llmaas_memory(self) -> list[MemoryClaim]:
        """Tell what contexts in RAM save."""
        return self._store.claims() if "_store" in self.__dict__ else []

    @hookimpl
    def llmaas_status(self) -> dict[str, Any]:
        """Return the codec, the sizes and the counters."""
        opened = "_store" in self.__dict__
        return {
            "codec": self._config.codec,
            "chunk_tokens": CHUNK_TOKENS,
            **(self._store.stats() if opened else {"store": None}),
            **self._parked_stats(),
            **self._counters.snapshot(),
        }

    @hookimpl
    def llmaas_shutdown(self) -> None:
        """Write dirty chunks and close the store."""
        with contextlib.ExitStack() as closing:  # Ctrl-C ends a wait, but leaves nothing open
            if "_store" in self.__dict__:
                closing.callback(self._store.close)
            if "_workers" in self.__dict__:
                closing.callback(self._workers.close)

    def places(self, context_ids: Iterable[str]) -> dict[str, dict[str, dict[str, int]]]:
        """Return tokens and bytes of named contexts by place (``context_places``)."""
        if "_store" not in self.__dict__:
            return {}
        with self._lock:
            engines = [(engine, found) for engine, found in self._transfers.items() if found]
        return context_places(self._store, engines, context_ids)

    def written(self) -> None:
        """Return once all that was saved so far is on disk, or could not be written."""
        if "_workers" in self.__dict__:
            self._workers.write.submit(lambda: None).result()

    def _all_transfers(self) -> list[Transfer]:
        with self._lock:
            return [transfer for transfer in self._transfers.values() if transfer]

    def _parked_stats(self) -> dict[str, int]:
        total: Counter[str] = Counter()
        for transfer in self._all_transfers():
            total.update(transfer.parked_stats())
        return dict(total)

    # -- made when first needed -----------------------------------------------------------------

    @lazy
    def _workers(self) -> Workers:
        return Workers()

    @lazy
    def _staging(self) -> Staging:
        if self._natives:  # few cells go through the buffers
            return Staging(self._store.space, _SMALL_SEGMENT_BYTES)
        return Staging(self._store.space)

    @lazy
    def _store(self) -> ChunkStore:
        config = self._config
        disk = None
        if config.disk_budget:
            disk = DiskStore(config.store, int(config.disk_budget))
        else:
            name_older(config.store.expanduser())
        return ChunkStore(
            Budget(config.ram_bytes),
            disk,
            eviction=config.eviction,
            write_budget=config.write_budget,
        )

    def _open(self) -> ChunkStore:
        # Two engines may be created at the same time, and a fork waits for the end of the opening:
        # the child must not have files that no ChunkStore watches over. Ctrl-C waits, too: files
        # that belong to no ChunkStore would stay open and locked.
        with signals_wait(), self._lock, forks.postponed():
            return self._store

    def _transfer(self, engine: Engine) -> Transfer | None:
        """Return an engine's transfer; None if it is not served or not identified yet."""
        reason = alteration(engine)  # check each time: older chunks would be wrong
        if reason is not None:
            self._log_refusal(engine.llama.model_path, reason)
            return None
        return self._identified(engine, may_wait=True)

    def _identified(self, engine: Engine, *, may_wait: bool = False) -> Transfer | None:
        with self._lock:
            if engine in self._transfers:
                return self._transfers[engine]
            reason = self._records.why_unserved(engine)
            wait_s = _IDENTIFY_S if may_wait and engine not in self._engines_waited else 0.0
            if may_wait:
                self._engines_waited.add(engine)
        identity = None
        try:
            if reason is None:
                identity = self._records.identity(engine, wait_s)  # may wait, so hold no lock
        except StoreError as error:
            reason = str(error)
        if reason is not None:
            self._log_refusal(engine.llama.model_path, reason)
        elif identity is None:
            return None  # a later request asks again
        with self._lock:
            if engine not in self._transfers:
                found = None if identity is None else self._make_transfer(engine, identity)
                self._transfers[engine] = found
            return self._transfers[engine]

    def _make_transfer(self, engine: Engine, values: Mapping[str, Any]) -> Transfer:
        @functools.lru_cache(1024)
        def root(app: str | None) -> bytes:
            """Return an app's root. Apps share one only if allowed: times reveal what is stored."""
            is_shared = app is None or self._config.share_across_apps
            return hashed(values if is_shared else {**values, "app": app})

        made = self._transfers_by_ctx[engine.ctx] = Transfer(engine, root, self._parts(engine))
        return made

    def _parts(self, engine: Engine) -> TransferParts:
        config, native = self._config, self._natives.get(engine.ctx)
        bit_allocator = attention = None
        if config.codec == "tolerance":
            bit_allocator = BitAllocator(self._store, config.levels, config.ratio_global)
            attention = None if native is None else ChunkAttention(native)
        memory = None if native is None else native.cells()
        parking, space, is_own = None, self._store.space, not engine.n_spare
        is_exact = config.codec == "lossless" and is_own  # cells that the app asked for
        if not is_own or self._records.parks(engine.ctx):
            parking = ParkedContexts(engine, only_interrupted=is_own, only_whole=is_exact)
        return TransferParts(
            store=self._store,
            codec=_CODECS[config.codec],
            bit_allocator=bit_allocator,
            attention=attention,
            parking=parking,
            spare=cells_for(engine, parking, space, memory, is_exact=is_exact),
            is_exact=is_exact,
            memory=memory,
            recomputes=config.recompute,
            staging=self._staging,
            workers=self._workers,
            saved=self._saved,
        )

    def _saved(self, seconds: float) -> None:
        """Count a swap-out of cells, and begin to write them to disk."""
        self._counters.saved(seconds)
        if self._config.swap_out == "ahead":
            self._workers.write.submit(self._flush)

    def _flush(self) -> None:
        try:
            self._store.flush()
            self._store.reader.refill()
        except Exception as error:
            self._background_failures.failed(
                "writing or reading chunks ahead of time failed; contexts will be recomputed",
                error=error,
            )
        else:
            self._background_failures.worked()

    def _stop_serving(self, engine: Engine, error: BudgetError) -> None:
        with self._lock:
            transfer = self._transfers[engine]
            self._transfers[engine] = None
        if transfer is not None:
            transfer.close()
        self._log_refusal(engine.llama.model_path, str(error))

    def _log_refusal(self, path: str, reason: str) -> None:
        named = f"{Path(path).name}: {reason}"
        if self._counters.refused(named):
            _log.warning("kv_chunks does not serve a context: %s", named)

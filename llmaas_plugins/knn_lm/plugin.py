"""The plugin's hooks: they open the datastore and choose the tokens that it affects."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from llmaas_hooks import (
    ContextCreate,
    DecodeStep,
    Drafter,
    Engine,
    LogitsView,
    MemoryClaim,
    NativeContext,
    Request,
    StoreError,
    forks,
    hookimpl,
)
from llmaas_plugins.knn_lm.archive.files import EVIDENCE, SELECTED
from llmaas_plugins.knn_lm.archive.fingerprint import fingerprint
from llmaas_plugins.knn_lm.build.archive_source import SelectionParams
from llmaas_plugins.knn_lm.build.learner import Learner
from llmaas_plugins.knn_lm.config import KnnLMConfig
from llmaas_plugins.knn_lm.drafts.registry import DraftRegistry
from llmaas_plugins.knn_lm.mixing.evidence import Evidence
from llmaas_plugins.knn_lm.mixing.judgment import Judgment
from llmaas_plugins.knn_lm.mixing.mixer import MixCounts, Mixer, Mixing, MixSource
from llmaas_plugins.knn_lm.mixing.saving import Saving
from llmaas_plugins.knn_lm.opened import Opened

__all__ = ["KnnLM"]

_NAME = "knn_lm"

_log = logging.getLogger("llmaas.knn_lm")


@dataclass(slots=True)
class _Served:
    """An engine whose logits are mixed.

    Attributes:
        engine: The engine.
        mixer: Mixer of the engine's logits.
        fingerprint: Fingerprint of the engine's model.
    """

    engine: Engine
    mixer: Mixer
    fingerprint: bytes


class KnnLM:
    """Plugin that mixes the next token's distribution with the targets of similar stored states."""

    Config: ClassVar[type[KnnLMConfig]] = KnnLMConfig

    def __init__(self, config: KnnLMConfig) -> None:
        """Store the configuration; the first request opens the datastore."""
        self._config = config
        self._path = config.store.expanduser() / SELECTED
        self._lock = forks.lock()
        self._contexts: dict[int, NativeContext] = {}
        self._unsupported: dict[int, str] = {}
        self._served: dict[int, _Served] = {}
        self._begun: dict[int, int] = {}  # id of the last request, by context
        self._interruptible: dict[int, tuple[_Served, Mixing, int]] = {}  # by the request's id
        self._prepared: weakref.WeakSet[Engine] = weakref.WeakSet()
        self._opened: Opened | None = None
        self._unserved: dict[str, str] = {}
        self._counts = MixCounts()
        self._saving = Saving(self._save_evidence)
        self._evidence = Evidence(self._path.parent / EVIDENCE, self._saving.changed)
        self._drafts = DraftRegistry(self._path.parent, shares=config.share_across_apps)
        params = SelectionParams(config.size, config.k, config.dims, how=config.how)
        self._learner = Learner(
            self._path.parent, config.key, params, config.idle_s, self._contexts
        )

    # -- hooks ----------------------------------------------------------------------------------

    @hookimpl
    def llmaas_context_create(self, create: ContextCreate) -> None:
        """Note contexts whose outputs are not in the order of their tokens."""

        def made(ctx: int) -> bool:
            several = create.params.n_seq_max > 1 and not create.params.kv_unified
            with self._lock:
                self._contexts.pop(ctx, None)  # a freed context may have had this address
                self._served.pop(ctx, None)
                self._unsupported.pop(ctx, None)
                if several:
                    self._unsupported[ctx] = "it has several sequences, and kv_unified is off"
            return True

        create.checks.append(made)

    @hookimpl
    def llmaas_native_context(self, context: NativeContext) -> None:
        """Remember the context, so that its hidden states can be captured."""
        self._contexts[context.ctx] = context

    @hookimpl
    def llmaas_context_free(self, ctx: int) -> None:
        """Forget a context and stop mixing its logits."""
        self._learner.context_freed(ctx)
        with self._lock:
            self._contexts.pop(ctx, None)
            self._unsupported.pop(ctx, None)
            self._begun.pop(ctx, None)
            self._drop(ctx)

    @hookimpl
    def llmaas_request_begin(self, request: Request) -> None:
        """Open the datastore on disk if it is new, and prepare mixing for it."""
        self._begin(request)
        self._mix(request)

    @hookimpl
    def llmaas_draft(self, request: Request) -> Drafter | None:
        """Propose continuations from the app's chats."""
        if not self._config.drafts or _NAME in request.declined:
            return None
        return self._drafts.drafter(request.engine, request.app)

    @hookimpl
    def llmaas_request_resume(self, request: Request, n_generated: int) -> None:
        """Mix as before another request used the engine.

        A datastore that was judged on the prompt keeps its weight. If another one replaced it, that
        one serves the rest of the request.
        """
        self._begin(request)
        before = self._interruptible.get(id(request))
        self._go_on(request)
        if before is not None:
            request.engine.n_outputs = 1 if n_generated else before[2]

    @hookimpl
    def llmaas_request_switch(self, request: Request) -> None:
        """Mix for a request that lay aside, from the same datastore, or from what replaced it."""
        engine, n_outputs = request.engine, request.engine.n_outputs
        self._begun[engine.ctx] = id(request)
        self._go_on(request)
        engine.n_outputs = n_outputs

    @hookimpl
    def llmaas_request_end(self, request: Request) -> None:
        """Stop mixing; the device may be idle now."""
        begun = self._interruptible.get(id(request))
        try:
            if begun is not None:
                begun[1].end()  # while ``llmaas_kv_evict`` can still find it
        finally:
            self._interruptible.pop(id(request), None)
            self._end(request)

    @hookimpl
    def llmaas_decode(self, step: DecodeStep) -> None:
        """Take the hidden states behind the batch's logits."""
        if (served := self._served.get(step.ctx)) is not None:
            served.mixer.decoded()
            engine = served.engine
            if engine.n_outputs > 1 and engine.is_evaluating:
                served.mixer.judge(step.ctx, int(engine.llama.n_tokens), step.n_tokens)

    @hookimpl
    def llmaas_logits(self, view: LogitsView) -> None:
        """Mix logits before a token is sampled from them (Eqs 1, 2, 32 and 33)."""
        if (served := self._served.get(view.ctx)) is not None:
            served.mixer.restore(view)
            if served.engine.n_outputs > 1:  # nothing may have been evaluated
                served.mixer.recall()
            llama = served.engine.llama
            end = llama.n_tokens + view.index + 1 if view.index < 0 else llama.n_tokens  # in a seat
            served.mixer.mix(view, llama.input_ids[:end])

    @hookimpl
    def llmaas_kv_evict(self, context_id: str) -> int:
        """Erase what is remembered of a context's tokens."""
        for _, mixing, _ in list(self._interruptible.values()):
            mixing.forget(context_id)
        self._evidence.forget(context_id)
        return 0

    @hookimpl
    def llmaas_memory(self) -> list[MemoryClaim]:
        """Tell what the datastore and the drafts take."""
        opened = self._opened
        keys = 0 if opened is None else opened.datastore.memory_bytes
        drafts, why = self._drafts.n_bytes, "answers are proposed from stored chats"
        found = [
            MemoryClaim.reserved("datastore", keys, "each token is looked up in it"),
            MemoryClaim.reserved("drafts", drafts, why),
        ]
        return [one for one in found if one.held]

    @hookimpl
    def llmaas_status(self) -> dict[str, Any]:
        """Return the datastore's state and the counts of mixed tokens."""
        opened = self._opened
        return {
            "datastore": str(self._path),
            "pairs": None if opened is None else len(opened.datastore),
            "memory_bytes": 0 if opened is None else opened.datastore.memory_bytes,
            "key": None if opened is None else opened.key,
            "mixture": None if opened is None else opened.settings.mixture.as_json(),
            "remembered_gains": len(self._evidence),
            "k": self._config.k,
            "skip_above": None if opened is None else opened.settings.skip_above,
            **dataclasses.asdict(self._counts),
            **(self._drafts.stats() if self._config.drafts else {}),
            "left_alone": dict(self._unserved),
            "waiting": self._learner.n_waiting,
            "learned": self._learner.n_learned,
            "learning_error": self._learner.last_error,
        }

    @hookimpl
    def llmaas_shutdown(self) -> None:
        """Stop learning and close the datastore."""
        with contextlib.ExitStack() as closing:  # runs every step, even after a Ctrl-C
            closing.callback(self._close)
            closing.callback(self._save_evidence)
            closing.callback(self._saving.close)
            closing.callback(self._drafts.close)
            closing.callback(self._learner.close)

    # -- internals ------------------------------------------------------------------------------

    def _begin(self, request: Request) -> None:
        """Let the device count as busy, and serve the request's engine if it can be served."""
        engine = request.engine
        self._begun[engine.ctx] = id(request)
        if self._config.learn:
            self._learner.request_began(request)
        if self._config.mix:
            self._serve_if_changed(engine)

    def _go_on(self, request: Request) -> None:
        """Mix as before in a request, or from what replaced its datastore."""
        before = self._interruptible.get(id(request))
        if before is not None and before[0] is self._served.get(request.engine.ctx):
            before[0].mixer.resume(before[1])
        else:
            self._mix(request)

    def _mix(self, request: Request) -> None:
        """Mix the datastore in that the request's app may use, from now on."""
        engine = request.engine
        with self._lock:  # another thread may be renewing the datastore
            served, opened = self._served.get(engine.ctx), self._opened
        if served is None:
            return
        mixes = self._config.alpha != 0 and self._config.skip_above != 0
        is_on = _NAME not in request.declined
        source = self._source_for(request.app, opened) if is_on else None
        look_back = self._config.look_back if mixes else 0
        judgment = self._judgment(request, source, look_back) if source and look_back else None
        mixing = Mixing(source, judgment)
        served.mixer.resume(mixing)
        engine.n_outputs = 1 if judgment is None else look_back
        self._interruptible[id(request)] = served, mixing, engine.n_outputs

    def _judgment(self, request: Request, source: MixSource, look_back: int) -> Judgment:
        """Return the judgment of a datastore in a request that begins."""
        digest = source.datastore.digest
        evidence = self._evidence if self._evidence.bind(digest) else None
        root = self._evidence.root(digest, request.app, source.ranges, source.settings)
        return Judgment(request, look_back, source.mixture, digest, evidence, root)

    def _end(self, request: Request) -> None:
        """Let the device count as idle, and stop mixing if no other request uses the engine."""
        if self._config.learn:
            self._learner.request_ended(request)
        if self._begun.get(request.engine.ctx) != id(request):
            return  # it was interrupted or lay aside, and another request uses the engine
        if (served := self._served.get(request.engine.ctx)) is not None:
            served.mixer.end()

    def _source_for(self, app: str | None, opened: Opened | None) -> MixSource | None:
        """Return the pairs that an app may use, or None if there are no such pairs."""
        if opened is None:
            return None
        all_apps = self._config.share_across_apps
        ranges = opened.datastore.ranges_for(app, all_apps=all_apps)
        return dataclasses.replace(opened.source, ranges=ranges) if ranges else None

    def _serve_if_changed(self, engine: Engine) -> None:
        """Start or renew serving of an engine that is new, or after the datastore changed."""
        is_altered = engine.alteration is not None and engine.ctx in self._served
        if engine not in self._prepared or not self._is_current() or is_altered:
            self._serve(engine)
            self._prepared.add(engine)

    def _is_current(self) -> bool:
        """Return whether the open datastore, or the lack of one, matches the disk."""
        opened = self._opened
        return not self._path.exists() if opened is None else opened.datastore.is_current()

    def _serve(self, engine: Engine) -> None:
        """Mix this engine's logits from now on, or log why not.

        Raises:
            StoreError: The datastore cannot be used.
        """
        model = Path(engine.llama.model_path).name
        with self._lock:
            former = self._unserved.pop(model, None)
            try:
                reason = (
                    self._unsupported.get(engine.ctx)
                    or (engine.alteration and f"the app called {engine.alteration}")
                    or self._prepare(engine)
                )
            except StoreError as error:
                self._drop(engine.ctx)
                self._unserved[model] = str(error)
                raise
            if reason is not None:
                self._drop(engine.ctx)
                self._unserved[model] = reason
                if reason != former:
                    _log.warning("knn_lm leaves %s as it is: %s", model, reason)

    def _prepare(self, engine: Engine) -> str | None:
        native = self._contexts.get(engine.ctx)
        if native is None:
            return "its context was made before the activation, or the engine has no hook point"
        if engine.load is None:
            return "its model was loaded before the activation, or trained since"
        if not self._is_current() or self._opened is None:
            self._renew()
        if self._opened is None:
            return (
                f"there is no datastore in {self._path.parent}. Make one with "
                "`llmaas datastore build`"
            )
        opened, model = self._opened, fingerprint(engine.llama, engine.load)
        opened.require_model(self._path, engine.llama, model)
        if engine.ctx not in self._served:
            mixer = Mixer(native, opened.key, self._counts)
            self._served[engine.ctx] = _Served(engine, mixer, model)
        return None

    def _renew(self) -> None:
        """Open the datastore that is on disk now.

        Running requests in other threads keep the old datastore, and may be searching it. It is
        therefore not closed here, but when its last user releases it.
        """
        key = None if self._opened is None else self._opened.key
        self._opened = None
        self._prepared.clear()
        opened = Opened.open(self._path, self._config) if self._path.exists() else None
        for ctx, served in list(self._served.items()):
            wanted = opened and (opened.key, opened.datastore.fingerprint)
            if wanted != (key, served.fingerprint):
                self._drop(ctx)
        self._opened = opened

    def _save_evidence(self) -> None:
        """Write what was remembered, unless the datastore that it is about is gone."""
        if (opened := self._opened) is not None:
            self._evidence.save(opened.is_on_disk)

    def _drop(self, ctx: int) -> None:
        if (served := self._served.pop(ctx, None)) is not None:
            served.mixer.close()

    def _close(self) -> None:
        opened, self._opened = self._opened, None
        for ctx in list(self._served):
            self._drop(ctx)
        self._prepared.clear()
        if opened is not None:
            opened.datastore.close()

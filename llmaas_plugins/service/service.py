"""The LLM as a system service: LLMS Table 1 in Pythonic names.

===================================  ===========================================
``bindLLMService(app)``              ``LLMService.bind(app)``
``newLLMCtx(systemPrompt)``          ``App.new_context(system)``
``callLLM(stub, newPrompt)``         ``Context.call(prompt)``, ``Context.stream(prompt)``
``deLLMCtx(stub)``                   ``Context.delete()``
===================================  ===========================================
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from llmaas_hooks import ConfigError, Levels, LimitError
from llmaas_hooks.request_scope import promising
from llmaas_plugins.activation import active_suite
from llmaas_plugins.config import ServiceConfig
from llmaas_plugins.model.cell_types import needs_flash_attention
from llmaas_plugins.service.call_queue import CallQueue, Reply
from llmaas_plugins.service.context_log import ContextLog, ContextRecord
from llmaas_plugins.service.level_arguments import LevelArgument, levels_of
from llmaas_plugins.service.promise_arguments import check_promise, promise_of
from llmaas_plugins.service.share_arguments import check_share, share_of
from llmaas_plugins.service.state_lock import StateLock
from llmaas_plugins.service_config import APP_NAMES, is_app_name

__all__ = ["App", "Context", "LLMService", "Reply"]

_MOST_LISTED = 200
_NOWHERE = {
    "tokens": {"cells": 0, "parked": 0, "ram": 0, "disk": 0},
    "bytes": {"ram": 0, "disk": 0},
}


class LLMService:
    """Persistent contexts of many apps on one engine.

    KV is swapped by whatever plugins are active; without plugins, contexts are recomputed.
    """

    def __init__(
        self, engine: Any, config: ServiceConfig | None = None, *, is_admitted: bool = False
    ) -> None:
        """Serve an engine.

        Args:
            engine: A ``llama_cpp.Llama``, or a callable that returns one.
            config: Limits and directories.
            is_admitted: Whether the caller decides when each call runs, as ``llmaas serve`` does;
                otherwise calls run in the order of their arrival.

        Raises:
            StoreError: ``config.state_dir`` cannot be used, or another service uses it.
        """
        self.config = ServiceConfig() if config is None else config
        provider: Callable[[], Any] = (
            engine if callable(engine) and not _is_llama(engine) else (lambda: engine)
        )
        self._lock = StateLock(self.config.state_dir)
        try:
            self._log = ContextLog(self.config.state_dir)
            self._queue = CallQueue(provider, self.config, self._log, is_admitted=is_admitted)
            self._queue.finish_deletions()
        except BaseException:
            self._lock.release()  # explicitly: the error's traceback keeps this object alive
            raise

    @classmethod
    def open(cls, model: str | Path, config: ServiceConfig | None = None, **llama: Any) -> Self:
        """Load a model and serve it.

        Args:
            model: Path of a GGUF file.
            config: Limits and directories.
            **llama: Arguments of ``llama_cpp.Llama``. Flash attention is off by default, because it
                slows down single tokens on a CPU, unless quantized values need it.
        """
        from llama_cpp import Llama

        is_needed = needs_flash_attention(llama.get("type_v"))
        options = {"flash_attn": is_needed, "verbose": False, "n_ctx": 0, **llama}
        return cls(Llama(str(model), **options), config)

    def bind(self, app: str) -> App:
        """Return the service as ``app`` sees it.

        Raises:
            ConfigError: The name is empty, too long, or has characters that a URL's path cannot
                have.
        """
        if not is_app_name(app):
            raise ConfigError(f"app name must be {APP_NAMES}, found {app!r}")
        return App(app, self._log, self._queue, self.config)

    def status(self) -> dict[str, Any]:
        """Return the queue's length and the suite's status, as plain JSON types."""
        suite = active_suite()
        return {"queue": self._queue.n_calls(), **({} if suite is None else suite.status())}

    def overview(self, app: str | None = None) -> dict[str, Any]:
        """Return the number of contexts, and where the tokens of the latest are, as JSON types.

        ``places`` of a context has tokens in ``cells``, ``parked``, in ``ram`` and on ``disk``, as
        kv_chunks knows them, and ``bytes`` has those in ``ram`` and on ``disk``. Both are None
        without kv_chunks. ``memory`` has the process's memory by owner.

        Args:
            app: App whose contexts are counted and listed; None for those of all apps, and for the
                memory of the process.
        """
        records = self._log.latest(app, _MOST_LISTED)
        suite = active_suite()
        has_places = suite is not None and "kv_chunks" in suite.config.enabled()
        found = {}
        if suite is not None and has_places:
            found = suite.plugin("kv_chunks").places([record.id for record in records])
        other: dict[str, Any] = _NOWHERE if has_places else {"tokens": None, "bytes": None}
        places = [found.get(record.id, other) for record in records]
        return {
            "n_contexts": self._log.n_contexts(app),
            "contexts": [
                {**record.summary(), "places": at["tokens"], "bytes": at["bytes"]}
                for record, at in zip(records, places, strict=True)
            ],
            **({} if suite is None or app is not None else {"memory": suite.memory()}),
        }

    def close(self) -> None:
        """Close the context log; the engine stays its owner's and is not used again.

        A call that still runs or waits fails with ``StoreError`` and leaves its context unchanged.
        """
        self._queue.close()
        self._log.close()
        self._lock.release()

    def __enter__(self) -> Self:
        """Return the service."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the service."""
        self.close()


@dataclass(frozen=True, slots=True)
class App:
    """One app's view of the service: its own contexts, and no others."""

    name: str
    _log: ContextLog
    _queue: CallQueue
    _config: ServiceConfig

    def new_context(self, system: str | None = None) -> Context:
        """Start a context, with a system prompt if given.

        Raises:
            LimitError: The app has ``max_contexts_per_app`` contexts already.
        """
        messages = [{"role": "system", "content": system}] if system else []
        now = self._log.now(self.name)
        record = ContextRecord(uuid.uuid4().hex, self.name, messages, created=now, used=now)
        most = self._config.max_contexts_per_app
        if not self._log.add(record, most):
            raise LimitError(
                f"app {self.name!r} has {most} contexts or more, the limit is {most}. "
                "Delete one, or raise service.max_contexts_per_app."
            )
        return Context(record.id, self)

    def contexts(self) -> list[Context]:
        """Return the app's contexts, most recently used first; contexts survive restarts."""
        return [Context(record.id, self) for record in self.records()]

    def records(self) -> list[ContextRecord]:
        """Return the records of these contexts, as they are at one moment."""
        return self._log.of_app(self.name)

    def context(self, context_id: str) -> Context:
        """Return the app's context named ``context_id``.

        Raises:
            LookupError: The app has no context of that name.
        """
        self.record(context_id)
        return Context(context_id, self)

    def record(self, context_id: str) -> ContextRecord:
        """Return a context's messages and sizes.

        Raises:
            LookupError: The app has no context of that name.
        """
        record = self._log.get(context_id, self.name)
        if record is None:
            raise self._unknown(context_id)
        return record

    def stream(
        self, context_id: str, prompt: str, levels: Levels, sampling: dict[str, Any]
    ) -> Generator[str, None, Reply]:
        """Generate a reply in a context, as ``Context.stream`` does."""
        return self._queue.run(lambda: self.record(context_id), prompt, levels, sampling)

    def delete(self, context_id: str) -> int:
        """Delete a context, as ``Context.delete`` does."""
        if not self._queue.reserve.lent_to(lambda: self._log.delete(context_id, self.name)):
            raise self._unknown(context_id)
        return self._queue.forget([context_id])

    def _unknown(self, context_id: str) -> LookupError:
        return LookupError(f"app {self.name!r} has no context {context_id!r}")


@dataclass(frozen=True, slots=True)
class Context:
    """A persistent context (the paper's LLMCtxStub): a name that stays valid after restarts."""

    id: str
    app: App

    def __repr__(self) -> str:
        """Return the context's names, without the service's settings and tables."""
        return f"Context({self.id!r}, app={self.app.name!r})"

    def call(
        self,
        prompt: str,
        *,
        level: LevelArgument = None,
        prompt_share: float | None = None,
        slo: Mapping[str, str] | None = None,
        **sampling: Any,
    ) -> Reply:
        """Append ``prompt`` as a user turn and generate the reply.

        Args:
            prompt: The user's turn.
            level: Share of an elastic model to use: ``0.6``, or ``{"prefill": 0.4, "decode":
                0.8}``.
            prompt_share: Share of the prompt's tokens to read, such as 0.5; 1 keeps it whole.
            slo: Latency to keep: ``{"ttft": "300 ms", "tpot": "60 %"}``, or one of the two.
            **sampling: Arguments of ``Llama.create_chat_completion``: ``max_tokens``,
                ``temperature``, ``top_p``, ``stop``, ``seed``, ``grammar``, …

        Raises:
            ConfigError: The level, the share or the latency is invalid, or not available.
            LimitError: The context is full, or too many calls wait.
            LookupError: The context was deleted.
            StoreError: The service was closed.
        """
        stream = self.stream(prompt, level=level, prompt_share=prompt_share, slo=slo, **sampling)
        while True:
            try:
                next(stream)
            except StopIteration as end:
                reply: Reply = end.value
                return reply

    def stream(
        self,
        prompt: str,
        *,
        level: LevelArgument = None,
        prompt_share: float | None = None,
        slo: Mapping[str, str] | None = None,
        **sampling: Any,
    ) -> Generator[str, None, Reply]:
        """Act like ``call``, but yield text as it comes; the generator returns the ``Reply``.

        A stream that is closed early leaves the context as it was before the call.
        """
        levels, promise = levels_of(level).over(share_of(prompt_share)), promise_of(slo)
        check_share(levels)
        check_promise(promise)
        with promising(promise):  # the stream belongs to the blocks in which it is made
            return self.app.stream(self.id, prompt, levels, sampling)

    def record(self) -> ContextRecord:
        """Return the context's messages and sizes.

        Raises:
            LookupError: The context was deleted.
        """
        return self.app.record(self.id)

    def delete(self) -> int:
        """Delete the context's text, and its KV in every tier; return the bytes of KV freed.

        No file has either when this returns. After an error, the context is deleted, but bytes of
        it may be left. Deleting it again, or the next service, erases them. A call that still runs
        in the context fails when it is done.

        Raises:
            LookupError: The context was deleted already.
            PluginError: A plugin could not erase the KV.
            StoreError: The text could not be erased, for instance because another process reads the
                file.
        """
        return self.app.delete(self.id)


def _is_llama(engine: object) -> bool:
    return hasattr(engine, "create_chat_completion")

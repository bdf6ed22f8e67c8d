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
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from llmaas_hooks import ConfigError, LimitError
from llmaas_plugins.activation import active_suite
from llmaas_plugins.config import ServiceConfig
from llmaas_plugins.service.claim import Claim
from llmaas_plugins.service.contexts import ContextLog, ContextRecord
from llmaas_plugins.service.levels import LevelArgument, levels_of
from llmaas_plugins.service.turns import Reply, Turns

__all__ = ["App", "Context", "LLMService", "Reply"]

_LONGEST_NAME = 128


class LLMService:
    """Persistent contexts of many apps on one engine.

    KV is swapped underneath by whatever plugins are active; without any, contexts are recomputed.
    """

    def __init__(self, engine: Any, config: ServiceConfig | None = None) -> None:
        """Serve ``engine``, a ``llama_cpp.Llama`` or a callable that returns one.

        Raises:
            StoreError: ``config.state_dir`` cannot be used, or another service uses it.
        """
        self.config = ServiceConfig() if config is None else config
        provider: Callable[[], Any] = (
            engine if callable(engine) and not _is_llama(engine) else (lambda: engine)
        )
        self._claim = Claim(self.config.state_dir)
        try:
            self._log = ContextLog(self.config.state_dir)
            self._turns = Turns(provider, self.config, self._log)
            self._turns.finish_deletions()
        except BaseException:
            self._claim.release()  # an error keeps its frames, and they this
            raise

    @classmethod
    def open(cls, model: str | Path, config: ServiceConfig | None = None, **llama: Any) -> Self:
        """Load a model and serve it.

        Args:
            model: A GGUF file.
            config: Limits and places.
            **llama: Arguments of ``llama_cpp.Llama``. Flash attention is on unless they say not:
                it keeps V untransposed, so contexts are swapped faster.
        """
        from llama_cpp import Llama

        options = {"flash_attn": True, "verbose": False, "n_ctx": 0, **llama}
        return cls(Llama(str(model), **options), config)

    def bind(self, app: str) -> App:
        """The service as ``app`` sees it.

        Raises:
            ConfigError: The name is empty or too long, or could not be part of a URL's path.
        """
        if not app or len(app) > _LONGEST_NAME or not app.isprintable() or "/" in app:
            raise ConfigError(
                f"app name must be 1 to {_LONGEST_NAME} printable characters without '/', "
                f"found {app!r}"
            )
        return App(app, self._log, self._turns, self.config)

    def status(self) -> dict[str, Any]:
        """Queue and suite status, as plain JSON types."""
        suite = active_suite()
        return {"queue": self._turns.queue_length(), **({} if suite is None else suite.status())}

    def close(self) -> None:
        """Close the context log. The engine stays its owner's, and nothing here touches it again.

        A call that still runs or waits fails with ``StoreError``; its context is as before it.
        """
        self._turns.close()
        self._log.close()
        self._claim.release()

    def __enter__(self) -> Self:
        """Use as a context manager."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()


@dataclass(frozen=True, slots=True)
class App:
    """One app's view: its own contexts, and no others."""

    name: str
    _log: ContextLog
    _turns: Turns
    _config: ServiceConfig

    def new_context(self, system: str | None = None) -> Context:
        """Start a context, with a system prompt if given.

        Raises:
            LimitError: The app has ``max_contexts_per_app`` already.
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
        """The app's contexts, most recently used first; they survive restarts."""
        return [Context(record.id, self) for record in self.records()]

    def records(self) -> list[ContextRecord]:
        """What ``contexts`` lists, as it is at one moment."""
        return self._log.of_app(self.name)

    def context(self, context_id: str) -> Context:
        """The app's context named ``context_id``.

        Raises:
            LookupError: It has none of that name.
        """
        self._record(context_id)
        return Context(context_id, self)

    def _record(self, context_id: str) -> ContextRecord:
        record = self._log.get(context_id, self.name)
        if record is None:
            raise self._unknown(context_id)
        return record

    def _unknown(self, context_id: str) -> LookupError:
        return LookupError(f"app {self.name!r} has no context {context_id!r}")


@dataclass(frozen=True, slots=True)
class Context:
    """A persistent context (the paper's LLMCtxStub): a name, good after restarts too."""

    id: str
    app: App

    def call(self, prompt: str, *, level: LevelArgument = None, **sampling: Any) -> Reply:
        """Append ``prompt`` as a user turn and generate the reply.

        Args:
            prompt: The user's turn.
            level: How much of an elastic model to use: ``0.6``, or
                ``{"prefill": 0.4, "decode": 0.8}``.
            **sampling: Arguments of ``Llama.create_chat_completion``: ``max_tokens``,
                ``temperature``, ``top_p``, ``stop``, ``seed``, ``grammar``, …

        Raises:
            ConfigError: There is no such level, or the model has none.
            LimitError: The context is full, or too many calls wait.
            LookupError: It was deleted.
            StoreError: The service was closed.
        """
        stream = self.stream(prompt, level=level, **sampling)
        while True:
            try:
                next(stream)
            except StopIteration as end:
                reply: Reply = end.value
                return reply

    def stream(
        self, prompt: str, *, level: LevelArgument = None, **sampling: Any
    ) -> Generator[str, None, Reply]:
        """As ``call``, yielding text as it comes; the generator's value is the ``Reply``.

        A stream closed early leaves the context as it was before the call.
        """
        levels = levels_of(level)
        return self.app._turns.run(lambda: self.app._record(self.id), prompt, levels, sampling)

    def record(self) -> ContextRecord:
        """Messages and sizes.

        Raises:
            LookupError: It was deleted.
        """
        return self.app._record(self.id)

    def delete(self) -> int:
        """Forget the context: its text, and its KV in every tier; bytes of KV freed.

        Both are in no file any more when this returns. After an error the context is gone, but
        bytes of it may be left; deleting it again, or the next service, erases them. A call that is
        still running fails when it is done.

        Raises:
            LookupError: It was deleted already.
            PluginError: A plugin could not erase its KV.
            StoreError: Its text could not be erased, for instance because somebody reads the file.
        """
        if not self.app._log.delete(self.id, self.app.name):
            raise self.app._unknown(self.id)
        return self.app._turns.forget(self.id)


def _is_llama(engine: object) -> bool:
    return hasattr(engine, "create_chat_completion")

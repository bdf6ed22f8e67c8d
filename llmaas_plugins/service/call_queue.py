"""Calls on the engine, one at a time: wait, generate, commit."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from llama_cpp import llama_cpp

from llmaas_hooks import ConfigError, Levels, LimitError, LlmaasError, Promise, StoreError, forks
from llmaas_hooks.request_scope import at_levels, keep_scope, noting, promising, serving_context
from llmaas_patches.grammars import grammar_text
from llmaas_plugins.activation import active_suite
from llmaas_plugins.config import ServiceConfig
from llmaas_plugins.service.context_log import ContextLog, ContextRecord
from llmaas_plugins.service.level_arguments import check_levels
from llmaas_plugins.service.reserve import Reserve
from llmaas_plugins.service.window import Messages, Window, visible

__all__ = ["CallQueue", "Reply"]

_log = logging.getLogger("llmaas.service")

_Piece = tuple[str, str | None]


@dataclass(frozen=True, slots=True)
class Reply:
    """Result of a call.

    Attributes:
        text: Generated text.
        finish_reason: ``stop`` or ``length``.
        n_tokens: Tokens in the context after the call, as the model sees it.
        n_left_out: Oldest messages that this call removed from the model's view, because the
            context was at its limit.
        first_token_s: Seconds from the start on the engine to the first piece of text.
        total_s: Seconds on the engine.
        notes: Reports of plugins about the call, by the plugin's name.
    """

    text: str
    finish_reason: str
    n_tokens: int
    n_left_out: int
    first_token_s: float
    total_s: float
    notes: Mapping[str, Any] = field(default_factory=dict)


class CallQueue(forks.Forked):
    """Queue that serves calls in the order of their arrival, with a bounded number waiting."""

    def __init__(
        self,
        engine: Callable[[], Any],
        config: ServiceConfig,
        log: ContextLog,
        *,
        is_admitted: bool = False,
    ) -> None:
        """Serve the ``Llama`` that ``engine()`` returns.

        With ``is_admitted``, calls come when it is their turn, as a server's do, and ``close``
        comes after their end. One may interrupt another.
        """
        self._is_admitted = is_admitted
        self._engine = engine
        self._config = config
        self._log = log
        self.reserve = Reserve(config.state_dir.expanduser() / "reserve")
        # not the condition's own `with`: that is Python code, where Ctrl-C may leave it locked
        self._lock = forks.lock()
        self._turn = threading.Condition(self._lock)
        self._calls: deque[object] = deque()
        self._step = forks.lock()
        self._is_closed = False
        self._running: set[str] = set()  # ids of the contexts in which calls run
        self._counted: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()
        forks.watch(self)

    def n_calls(self) -> int:
        """Return the number of calls that run or wait."""
        with self._lock:
            return len(self._calls)

    def run(
        self,
        load: Callable[[], ContextRecord],
        prompt: str,
        levels: Levels,
        sampling: dict[str, Any],
    ) -> Generator[str, None, Reply]:
        """Generate a reply to ``prompt`` in the context that ``load()`` reads, at these levels.

        The call runs in the ``with`` blocks that are open now, wherever its pieces are read.

        Yields:
            Pieces of text.

        Returns:
            The reply, which is committed by then.

        Raises:
            ConfigError: Levels are asked for but not available, or the grammar is invalid.
        """
        return keep_scope(self._run(load, prompt, levels, sampling))

    def _run(
        self,
        load: Callable[[], ContextRecord],
        prompt: str,
        levels: Levels,
        sampling: dict[str, Any],
    ) -> Generator[str, None, Reply]:
        check_levels(levels)  # fail before waiting
        came = time.perf_counter()
        with self._slot(), self._context(load) as record, noting() as notes:
            waited = Promise(waited_s=time.perf_counter() - came)
            options = {"max_tokens": self._config.max_new_tokens, **sampling}
            with self._at_the_engine():
                llama = self._engine()
                _check_grammar(llama, options.get("grammar"))
                started = time.perf_counter()
                window = Window(self._config, llama)
                messages = [*record.messages, {"role": "user", "content": prompt}]
                counted = self._counted.setdefault(llama, set())
                is_counted = record.id in counted
                seen_from = window.start(record, messages, options, is_counted=is_counted)
            seen = visible(messages, seen_from)
            n_left_out = len(visible(messages, record.seen_from)) - len(seen)
            pieces: list[str] = []
            finish_reason, first_token_s = "stop", 0.0
            with closing(_completion(llama, record, seen, window, options)) as completion:
                for piece, reason in self._steps(completion, levels, waited):
                    finish_reason = reason or finish_reason
                    if piece:
                        first_token_s = first_token_s or time.perf_counter() - started
                        pieces.append(piece)
                        yield piece
            text = "".join(pieces).strip()
            record.messages = [*messages, {"role": "assistant", "content": text}]
            read = notes.get("short_prompts") or {"tokens": 0, "tokens_read": 0}
            record.n_tokens = _n_said(llama) + read["tokens"] - read["tokens_read"]
            record.used = self._log.now(record.app)
            record.n_calls += 1
            record.seen_from = seen_from
            if not self._log.update(record):
                raise LookupError(f"context {record.id} was deleted during the call")
            counted.add(record.id)
            total_s = time.perf_counter() - started
            n_tokens = record.n_tokens
            return Reply(text, finish_reason, n_tokens, n_left_out, first_token_s, total_s, notes)

    def forget(self, context_ids: Sequence[str]) -> int:
        """Erase contexts that were deleted from the log: all that plugins keep, then their texts.

        A call that still runs in one of them erases it again at its end.

        Returns:
            Bytes of KV freed.

        Raises:
            PluginError: A plugin failed.
            StoreError: A text is still in a file.
        """
        return self.reserve.lent_to(lambda: self._forget(context_ids))

    def _forget(self, context_ids: Sequence[str]) -> int:
        suite, has_kv = active_suite(), _stores_kv()
        try:
            freed = 0 if suite is None else sum(map(suite.evict, context_ids))
        finally:
            self._log.erase()
        for counted in list(self._counted.values()):
            counted.difference_update(context_ids)
        for context_id in context_ids:
            if not has_kv:
                self._log.leave_deletion(context_id)
            elif context_id not in self._running:
                self._log.end_deletion(context_id)
        return freed

    def finish_deletions(self) -> None:
        """Finish deletions that earlier services began, as far as a plugin can find the KV."""
        names = self._log.deletions(with_kv=_stores_kv())
        try:
            if names:
                self.forget(names)
        except LlmaasError as error:
            _log.warning("deleted contexts could not be erased yet: %s", error)

    def close(self) -> None:
        """End all calls, and wait until none uses the engine, which its owner may then close."""
        with self._lock:
            self._is_closed = True
            self._turn.notify_all()
        with self._step:
            pass

    def after_fork(self, *, in_child: bool) -> None:
        """Close the child's copy: the contexts' files belong to the parent."""
        self._is_closed = self._is_closed or in_child

    def _steps(
        self, completion: Iterator[_Piece], levels: Levels, waited: Promise
    ) -> Iterator[_Piece]:
        while True:
            with self._at_the_engine(), at_levels(levels), promising(waited):
                piece = next(completion, None)
            if piece is None:
                return
            yield piece

    @contextmanager
    def _context(self, load: Callable[[], ContextRecord]) -> Iterator[ContextRecord]:
        """Read the context that a call runs in; after the call, erase it if it was deleted.

        A stream that nobody reads any more may end inside the garbage collector, where no plugin
        can be called. The deletion has then erased everything unless the call had only just begun;
        the next service erases the rest.
        """
        name = None
        try:
            with self._at_the_engine():
                name = load().id
                self._running.add(name)
                if _stores_kv():
                    self._log.expect_kv(name)
                record = load()  # fails if it was deleted; later deletions see the call
            yield record
        finally:
            if name is not None:
                self._running.discard(name)
            suite = active_suite()
            may_erase = suite is None or not suite.is_collecting()
            if name is not None and may_erase and self._log.lacks(name):
                self.forget([name])  # also KV that the call saved

    @contextmanager
    def _at_the_engine(self) -> Iterator[None]:
        with nullcontext() if self._is_admitted else self._step:
            if self._is_closed:
                raise _closed()
            yield

    @contextmanager
    def _slot(self) -> Iterator[None]:
        call, most = object(), self._config.max_queue
        with self._lock:
            if len(self._calls) > most and not self._is_admitted:
                raise LimitError(
                    f"{len(self._calls)} calls are running or waiting, the limit is {most}. "
                    "Try again later, or raise service.max_queue."
                )
            self._calls.append(call)
        try:
            with self._lock:
                self._turn.wait_for(lambda: self._is_admitted or self._has_turn(call))
            yield
        finally:
            with self._lock:
                self._calls.remove(call)
                self._turn.notify_all()

    def _has_turn(self, call: object) -> bool:
        return self._is_closed or self._calls[0] is call


def _stores_kv() -> bool:
    """Return whether a plugin of the active suite stores KV."""
    suite = active_suite()
    return suite is not None and suite.hooks.listens("llmaas_kv_restore")


def _n_said(llama: Any) -> int:
    """Return the tokens in the context, without proposed ones, which must not end a reply."""
    suite = active_suite()
    return int(llama.n_tokens) if suite is None else suite.n_said(llama)


def _completion(
    llama: Any,
    record: ContextRecord,
    messages: Messages,
    window: Window,
    options: dict[str, Any],
) -> Generator[_Piece]:
    """Yield pieces of text with the finish reason, from llama-cpp-python's own chat completion.

    The completion itself keeps within ``n_ctx``; this function keeps within a shorter ``limit``.
    """
    try:
        with serving_context(record.id, record.app):
            stream = llama.create_chat_completion(messages=messages, stream=True, **options)
        with closing(stream):
            while True:
                # inside the loop, because some chat handlers begin their completion only here
                with serving_context(record.id, record.app):
                    chunk = next(stream, None)
                if chunk is None:
                    return
                is_full = _n_said(llama) >= window.limit
                choice = chunk["choices"][0]
                reason = choice["finish_reason"] or ("length" if is_full else None)
                yield choice["delta"].get("content") or "", reason
                if is_full:
                    return
    except ValueError as error:
        if "exceed context window" in str(error):
            raise window.full(record) from error
        raise


def _closed() -> StoreError:
    return StoreError("the service was closed; this call's prompt is not in its context")


def _check_grammar(llama: Any, grammar: Any) -> None:
    """Check that llama.cpp can parse an app's own ``LlamaGrammar``, or it would end the process.

    Raises:
        ConfigError: llama.cpp cannot parse the grammar.
    """
    text = grammar_text(grammar)
    if not text:
        return
    vocab = llama_cpp.llama_model_get_vocab(llama.model)
    sampler = llama_cpp.llama_sampler_init_grammar(vocab, text.encode(), b"root")
    if not sampler:
        raise ConfigError("grammar: llama.cpp cannot parse it")
    llama_cpp.llama_sampler_free(sampler)

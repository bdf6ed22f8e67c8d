"""``Llama.generate`` as a request: begin, restore, evaluate and sample as ever, save, end.

``create_completion``, chat, ``__call__``, the server and most clients end up in ``generate``.
Stored contexts are put under it by changing what ``Llama`` believes to hold before it looks for
the longest prefix itself; its body is never copied.
"""

from __future__ import annotations

import contextvars
import functools
import inspect
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from types import FunctionType
from typing import Any

import numpy as np
from llama_cpp import Llama

from llmaas_hooks import KVRestored, PluginError, Request, RequestStats, common_prefix
from llmaas_patches.engine import LlamaEngine
from llmaas_patches.host import Host
from llmaas_patches.scope import current_context, declined_plugins, in_its_blocks

__all__ = ["wrap_create_completion", "wrap_generate"]


def wrap_generate(host: Host, original: Callable[..., Any]) -> Callable[..., Any]:
    """``Llama.generate``: fire the request hooks around it.

    A request belongs to the blocks (``level``, ``without``, …) that it was made in, wherever its
    generator is run.
    """
    bind = inspect.signature(original).bind

    @functools.wraps(original)
    def generate(
        self: Llama, tokens: Sequence[int], *args: Any, **kwargs: Any
    ) -> Generator[int, Sequence[int] | None, None]:
        inner = original(self, tokens, *args, **kwargs)  # refuses wrong arguments, runs later
        given = bind(self, tokens, *args).arguments | kwargs if args else kwargs
        return steps(self, tokens, given, inner, contextvars.copy_context())

    def steps(
        llama: Llama,
        tokens: Sequence[int],
        given: Mapping[str, Any],
        inner: Generator[int, Sequence[int] | None, None],
        blocks: contextvars.Context,
    ) -> Generator[int, Sequence[int] | None, None]:
        host.collecting.require_none()  # nor can plugins be called there
        clock = _Clock()
        engine = host.engine(llama)
        engine.end()  # other requests, if their generators are still open
        engine.settle()
        resets = given.get("reset", True)
        if resets:
            engine.drop_sparse()
        request = blocks.run(_request, engine, tokens, given)
        try:
            n_reused, first_output = blocks.run(_begin, host, engine, request, resets=resets)
            engine.resident_app = request.app  # all that is left, and all that follows
        except BaseException:
            engine.n_outputs = 1
            host.hooks.request_end(request, clock.stats(len(request.tokens), 0))
            raise
        clock.prepared()

        def end() -> None:
            try:
                if _can_save(engine):
                    host.hooks.kv_save(request, engine.reusable_tokens())
            finally:
                host.hooks.request_end(request, clock.stats(len(request.tokens), n_reused))

        engine.begin(end)
        try:
            with engine.giving_outputs(first_output):
                token = next(inner, None)
            engine.n_said = int(llama.n_tokens)  # nothing is proposed with a prompt
            while token is not None:
                clock.token()
                reply = yield token
                try:
                    token = inner.send(reply)
                except StopIteration:
                    return
                engine.n_said += 1 if reply is None else 1 + len(reply)
        finally:
            inner.close()
            if not host.collecting.here():  # else, the next request does it
                engine.end(end)

    return generate


def wrap_create_completion(host: Host, original: Callable[..., Any]) -> Callable[..., Any]:
    """``Llama._create_completion``: streams belong to the blocks that they were made in.

    Echoed logprobs need every token's logits, so evaluate all.
    """
    bind = inspect.signature(original).bind

    @functools.wraps(original)
    def _create_completion(self: Llama, prompt: Any, *args: Any, **kwargs: Any) -> Any:
        inner = original(self, prompt, *args, **kwargs)
        given = bind(self, prompt, *args).arguments | kwargs if args else kwargs
        if given.get("echo") and given.get("logprobs") is not None:
            inner = _with_all_logits(host.engine(self), inner)
        return in_its_blocks(inner)

    return _create_completion


def _with_all_logits(
    engine: LlamaEngine, completion: Generator[Any, Any, None]
) -> Generator[Any, Any, None]:
    engine.needs_all_logits = True
    try:
        yield from completion
    finally:
        engine.needs_all_logits = False


def _request(engine: LlamaEngine, tokens: Sequence[int], given: Mapping[str, Any]) -> Request:
    """Return the request of a call with these arguments, in the blocks of its caller."""
    readers = (given.get("logits_processor"), given.get("stopping_criteria"))
    return Request(
        engine,
        np.asarray(tokens, dtype=np.int32),
        *current_context.get(),
        declined=declined_plugins.get(),
        reads_tokens=any(map(_is_app_s, readers)),
    )


def _is_app_s(readers: Any) -> bool:
    """Whether some of these are not functions of llama-cpp-python itself.

    Its logit bias reads no tokens, and its chat templates' criterion the last one that was said,
    which it is shown rightly even while proposed ones are verified.
    """
    return readers is not None and not all(
        isinstance(one, FunctionType) and one.__module__.startswith("llama_cpp.")
        for one in (readers if isinstance(readers, list) else [readers])
    )


def _begin(
    host: Host, engine: LlamaEngine, request: Request, *, resets: bool
) -> tuple[int, int | None]:
    """Ask the plugins, and restore.

    Returns:
        How many leading prompt tokens are in the cells, and the first that is to give logits.
    """
    host.hooks.request_begin(request, host.hooks.level(request))
    if not resets and engine.resident_app != request.app:  # it asked for another app's cells
        engine.doubt_resident()
    if not (_is_sound(engine, request, resets=resets) and resets):
        engine.n_outputs = 1  # positions of the prompt's tokens are not known
        return 0, None
    n_reused = _restore(host, engine, request)
    first_output = engine.make_room_for_outputs(len(request.tokens))
    return n_reused if first_output is None else min(n_reused, first_output), first_output


class _Clock:
    """Times of one request."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._prepare_s = 0.0
        self._first_token_s: float | None = None
        self._n_generated = 0

    def prepared(self) -> None:
        self._prepare_s = time.perf_counter() - self._started

    def token(self) -> None:
        self._n_generated += 1
        if self._first_token_s is None:
            self._first_token_s = time.perf_counter() - self._started

    def stats(self, n_prompt: int, n_reused: int) -> RequestStats:
        return RequestStats(
            n_prompt=n_prompt,
            n_reused=n_reused,
            n_generated=self._n_generated,
            prepare_s=self._prepare_s,
            first_token_s=self._first_token_s,
            total_s=time.perf_counter() - self._started,
        )


def _is_sound(engine: LlamaEngine, request: Request, *, resets: bool) -> bool:
    """Whether ``Llama`` knows what those cells hold that it goes on with."""
    n_kept = _common(engine, request) if resets else len(engine.resident_tokens())
    if n_kept > engine.n_explained:
        engine.tell_unexplained()
        return False
    return True


def _can_save(engine: LlamaEngine) -> bool:
    """Whether the context is there, and known.

    The app may have closed ``Llama`` under its generator, dropped both, or used the engine itself.
    """
    if not engine.is_alive or engine.llama.ctx is None:
        return False
    return engine.llama.n_tokens <= engine.n_explained


def _restore(host: Host, engine: LlamaEngine, request: Request) -> int:
    """Let a plugin load cells; leading prompt tokens that sequence 0 holds then."""
    if engine.needs_all_logits:
        engine.drop_restored()
        return _keep_own(engine, request)
    try:
        restored = _ask_to_restore(host, engine, request)
    except BaseException as error:  # Ctrl-C, too, leaves the cells in doubt
        engine.drop_resident()
        if not isinstance(error, PluginError):
            raise
        host.hooks.handle(error)
        return 0
    if restored is None:
        return _keep_own(engine, request)
    engine.set_restored(request.tokens[: restored.n_tokens])
    return restored.n_tokens


def _common(engine: LlamaEngine, request: Request) -> int:
    """Leading prompt tokens that are resident; another app's cells count as none."""
    if engine.resident_app != request.app:
        return 0
    return common_prefix(engine.resident_tokens(), request.tokens)


def _keep_own(engine: LlamaEngine, request: Request) -> int:
    """Empty sequence 0 if it holds another app's cells, or its time would tell what they are.

    Returns:
        Leading prompt tokens that it still holds.
    """
    if engine.resident_app != request.app:
        engine.drop_resident()
    return _common(engine, request)


def _ask_to_restore(host: Host, engine: LlamaEngine, request: Request) -> KVRestored | None:
    with engine.lent():
        restored = host.hooks.kv_restore(request)
    if restored is not None and not engine.has_cells(restored.n_tokens):
        raise host.hooks.blame(ValueError(f"returned {restored}, the engine has fewer cells"))
    return restored

"""Turn ``Llama.generate`` into a request: begin, restore, generate, save, end.

``create_completion``, chat, ``__call__``, the server and most clients call ``generate``. To use
stored contexts, the wrapper changes the tokens that ``Llama`` has recorded before ``generate``
itself looks for the longest common prefix. The body of ``generate`` is never copied.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any

import numpy as np
from llama_cpp import Llama

from llmaas_hooks import (
    KVRestored,
    Levels,
    PluginError,
    Request,
    RequestScope,
    common_prefix,
    request_scope,
)
from llmaas_patches.drafting import drafting_of
from llmaas_patches.engine import LlamaEngine
from llmaas_patches.host import Host
from llmaas_patches.wrappers.request_life import Clock, End, Run
from llmaas_patches.wrappers.turns import Turns

__all__ = ["wrap_create_completion", "wrap_generate"]

_Tokens = Generator[int, Sequence[int] | None, None]
_Reading = Callable[..., _Tokens]
"""Function from a prompt, and from options that change, to ``Llama``'s own generator."""


def wrap_generate(host: Host, original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``Llama.generate``: call the request hooks around it.

    A request belongs to the blocks (``level``, ``without``, …) in which it was made, wherever its
    generator runs.
    """
    bind = inspect.signature(original).bind

    @functools.wraps(original)
    def generate(
        self: Llama, tokens: Sequence[int], *args: Any, **kwargs: Any
    ) -> Generator[int, Sequence[int] | None, None]:
        tokens = _readable_twice(tokens)

        original(self, tokens, *args, **kwargs).close()  # checks the arguments now
        given = bind(self, tokens, *args).arguments | kwargs if args else kwargs
        options = {name: given[name] for name in given.keys() - {"self", "tokens"}}

        def reading(prompt: Sequence[int], **changed: Any) -> _Tokens:
            found: _Tokens = original(self, prompt, **(options | changed))
            return found

        run = Run(given, request_scope.current())
        found = _steps(host, self, tokens, reading, run)
        run.generator = weakref.ref(found)
        return found

    return generate


def _steps(
    host: Host,
    llama: Llama,
    tokens: Sequence[int],
    reading: _Reading,
    run: Run,
) -> _Tokens:
    """Yield the tokens of a request.

    Args:
        host: Host of the plugins.
        llama: Object that was called.
        tokens: The whole prompt.
        reading: Function that returns ``Llama``'s own generator for a prompt.
        run: Run of the generator.
    """
    inner = reading(tokens)
    end = _register(host, llama, tokens, run)
    engine, clock = end.engine, run.clock
    try:
        first_output, turns = _begin(host, end)
        if end.request.whole is not None:
            inner = reading(end.request.tokens.tolist())
        if turns is not None:
            turns.evaluate_prompt(end.levels, end.n_reused, first_output)
        if _goes_on(end):
            inner = reading(end.request.tokens[llama.n_tokens :].tolist(), reset=False)
        token = _first_token(end, inner, first_output)
        engine.n_said = int(llama.n_tokens)  # a draft model proposes nothing in a prompt
        while token is not None:
            clock.token(turns)
            end.n_held = int(llama.n_tokens)
            run.is_yielding = True
            engine.free_parked_at_end()
            reply = yield token
            run.is_yielding = False
            clock.resumed(turns)
            if turns is not None and engine.n_said == llama.n_tokens:  # no proposals are left
                turns.take_in_answer(end.levels, clock.n_generated, token, reply)
            try:
                token = inner.send(reply)
            except StopIteration:
                return
            engine.n_said += 1 if reply is None else 1 + len(reply)
    finally:
        inner.close()
        if not host.collecting.here():  # otherwise the next request ends it
            engine.end(end)
            end.give_up()
            engine.free_parked_at_end()


def wrap_create_completion(host: Host, original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``Llama._create_completion``: streams belong to the blocks in which they were made.

    A call with ``echo`` and ``logprobs`` needs every token's logits, so all tokens are evaluated.
    One with a ``suffix`` fills a gap, whose surroundings no plugin can tell, so it reads all words.
    """
    bind = inspect.signature(original).bind

    @functools.wraps(original)
    def _create_completion(self: Llama, prompt: Any, *args: Any, **kwargs: Any) -> Any:
        inner = original(self, prompt, *args, **kwargs)
        given = bind(self, prompt, *args).arguments | kwargs if args else kwargs
        if given.get("echo") and given.get("logprobs") is not None:
            inner = _with_all_logits(host.engine(self), inner)
        levels = Levels() if given.get("suffix") is None else Levels(prompt_share=1.0)
        with request_scope.at_levels(levels):
            return request_scope.keep_scope(inner)

    return _create_completion


def _with_all_logits(
    engine: LlamaEngine, completion: Generator[Any, Any, None]
) -> Generator[Any, Any, None]:
    engine.needs_all_logits = True
    try:
        yield from completion
    finally:
        engine.needs_all_logits = False


def _readable_twice(tokens: Sequence[int]) -> Sequence[int]:
    """Return a prompt that can be read twice, as ``Llama`` also accepts iterators."""
    return list(tokens) if isinstance(tokens, Iterator) else tokens


def _request(
    engine: LlamaEngine, tokens: Sequence[int], given: Mapping[str, Any], scope: RequestScope
) -> Request:
    """Return the request of a call with these arguments in this scope."""
    readers = (given.get("logits_processor"), given.get("stopping_criteria"))
    return Request(
        engine,
        np.asarray(tokens, dtype=np.int32),
        **scope._asdict(),
        reads_tokens=any(map(_is_app_s, readers)),
    )


def _is_app_s(readers: Any) -> bool:
    """Return whether any of these functions is not llama-cpp-python's own.

    Functions of llama-cpp-python do not count. Its logit bias reads no tokens. Its chat templates'
    stopping criterion reads the last accepted token, which is correct even during verification of
    proposed tokens.
    """
    return readers is not None and not all(
        isinstance(one, FunctionType) and one.__module__.startswith("llama_cpp.")
        for one in (readers if isinstance(readers, list) else [readers])
    )


def _register(host: Host, llama: Llama, tokens: Sequence[int], run: Run) -> End:
    """End other requests on the engine and register this one, so that it is ended whatever comes.

    Returns:
        Work to do at the request's end.
    """
    host.collecting.require_none()  # plugins cannot be called there
    run.clock = Clock()
    engine = host.engine(llama)
    host.leave_seats(engine.ctx)
    engine.end()  # ends other requests whose generators are still open
    engine.settle()
    engine.drop_half_restored()
    if run.resets:
        engine.drop_sparse()
    engine.app_drafts, engine.keeps_cells = llama.draft_model is not None, False
    end = End(host, engine, _request(engine, tokens, run.given, run.scope), run)
    engine.begin(end)
    return end


def _begin(host: Host, end: End) -> tuple[int | None, Turns | None]:
    """Begin a request, and restore cells.

    Returns:
        First token that must give logits if it is evaluated, or None if only the last one must; and
        the request's turns, or None if it keeps its engine to the end.
    """
    engine, run = end.engine, end.run
    end.is_begun = True
    try:
        with request_scope.entered(run.scope):
            first_output = _prepare(host, end)
        engine.resident_app = end.request.app  # the remaining cells and all later ones
    except BaseException:
        engine.n_outputs, end.n_reused = 1, 0
        raise
    end.drafting = drafting_of(host, engine, end.request)  # which reads the prompt that is left
    if end.drafting is not None:
        end.drafting.attach()
    run.clock.prepared()
    end.saves = True
    return first_output, _turns(host, end)


def _turns(host: Host, end: End) -> Turns | None:
    """Return the turns of a request, or None if it keeps its engine to the end."""
    if not (end.run.resets and end.is_sound and end.engine.can_be_left()):
        return None
    end.seat = host.seat(end)
    return Turns(host, end, end.run.scope, _restore)


def _goes_on(end: End) -> bool:
    """Return whether the cells are a beginning of the prompt, so that the rest can be evaluated.

    ``Llama`` would find and say the same, but it compares token by token, which takes longer than a
    switch.
    """
    engine, llama, n_prompt = end.engine, end.engine.llama, len(end.request.tokens)
    n = int(llama.n_tokens)
    if not (end.is_sound and engine.can_drop_tokens and 0 < n < n_prompt):
        return False
    if _common(engine, end.request) < n:
        return False
    if llama.verbose:
        found = f"{n} prefix-match hit, remaining {n_prompt - n} prompt tokens to eval"
        sys.stderr.write(f"Llama.generate: {found}\n")
    engine.require_evaluation()
    return True


def _first_token(end: End, inner: _Tokens, first_output: int | None) -> int | None:
    """Evaluate the prompt; return the first token, or None if the generator gives none."""
    engine, run = end.engine, end.run
    outputs, drops = engine.giving_outputs(first_output), engine.recording_drops()
    # `Llama.reset`, which comes first, gives the records to the scope's app
    with outputs, drops, request_scope.entered(run.scope):
        return next(inner, None)


def _prepare(host: Host, end: End) -> int | None:
    """Call the begin hooks, and restore cells.

    Returns:
        First token that gives logits if it is evaluated; None if only the last one does.
    """
    engine, request, resets = end.engine, end.request, end.run.resets
    shortens = resets and host.hooks.listens("llmaas_shorten") and _may_shorten(engine, request)
    reuses = resets and not engine.needs_all_logits
    end.levels = host.hooks.level(request, reuses=reuses, shortens=shortens)
    if shortens:
        end.request = request = _shortened(host, end)
    host.hooks.request_begin(request, end.levels)
    if not resets and engine.resident_app != request.app:  # it continues from another app's cells
        engine.doubt_resident()
    if resets and engine.needs_all_logits:
        engine.drop_restored()  # even if they were reused since
    if not (_is_sound(engine, request, resets=resets) and resets):
        engine.n_outputs = 1  # the positions of the prompt's tokens are unknown
        return None
    end.is_sound = True
    end.n_reused = _restore(host, engine, request)
    return engine.first_output(len(request.tokens))


def _may_shorten(engine: LlamaEngine, request: Request) -> bool:
    """Return whether a request may read a part of its prompt.

    An app that reads tokens, or the logits of all of them, counts on their positions. One that
    evaluated a part of the prompt itself, such as an image, has other cells than tokens say.
    """
    counts_on_places = (
        engine.needs_all_logits
        or engine.llama._logits_all
        or request.reads_tokens
        or _common(engine, request) > engine.n_explained
    )
    is_read = engine.has_room_for(len(request.tokens))  # else ``Llama`` is about to raise
    return is_read and not (counts_on_places or engine.is_warming_up)


def _shortened(host: Host, end: End) -> Request:
    """Return the request with the tokens that it reads."""
    request = end.request
    share = request.levels.over(end.levels).prompt_share
    if share == 1:
        return request
    tokens = host.hooks.shorten(request, share)
    return request if tokens is None else dataclasses.replace(request, tokens=tokens, whole=request)


def _is_sound(engine: LlamaEngine, request: Request, *, resets: bool) -> bool:
    """Return whether the tokens of all cells that the request continues from are known."""
    if engine.is_explained:
        return True
    n_kept = _common(engine, request) if resets else len(engine.resident_tokens())
    if n_kept > engine.n_explained:
        engine.tell_unexplained()
        return False
    return True


def _restore(host: Host, engine: LlamaEngine, request: Request) -> int:
    """Let a plugin restore cells; return how many leading prompt tokens sequence 0 then holds."""
    if engine.needs_all_logits or engine.is_warming_up:
        return _keep_own(engine, request)
    if not engine.has_room_for(len(request.tokens)):  # ``Llama`` is about to raise
        return _keep_own(engine, request)
    engine.begin_restore()
    try:
        restored = _ask_to_restore(host, engine, request)
        if restored is None:
            engine.keep_unrestored()
        else:
            engine.set_restored(request.tokens[: restored.n_tokens], request.app)
    except BaseException as error:  # after Ctrl-C the cells are unknown, too
        engine.drop_half_restored()
        if not isinstance(error, PluginError):
            raise
        host.hooks.handle(error)
        return 0
    return _keep_own(engine, request) if restored is None else restored.n_tokens


def _common(engine: LlamaEngine, request: Request) -> int:
    """Return how many leading prompt tokens are resident; another app's cells count as none."""
    if engine.resident_app != request.app:
        return 0
    return common_prefix(engine.resident_tokens(), request.tokens)


def _keep_own(engine: LlamaEngine, request: Request) -> int:
    """Empty sequence 0 if it holds another app's cells, whose reuse would be visible in timing.

    Returns:
        Number of leading prompt tokens that it still holds.
    """
    if engine.resident_app != request.app:
        engine.drop_resident()
    return _common(engine, request)


def _ask_to_restore(host: Host, engine: LlamaEngine, request: Request) -> KVRestored | None:
    with engine.lent():
        restored = host.hooks.kv_restore(request)
    if restored is not None and not engine.has_cells(restored.n_tokens):
        raise host.hooks.blame(ValueError(f"returned {restored}, but the engine has fewer cells"))
    return restored

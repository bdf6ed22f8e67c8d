"""Steps that benchmarks of levels time: a few tokens after others, or a prompt."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable
from typing import Any

from llmaas_eval.batches import Batches, batches, loaded
from llmaas_eval.elastic.engine import Claimer, Variant
from llmaas_hooks import NativeContext
from llmaas_plugins import activate

__all__ = ["DEPTH", "N_TOKENS", "claiming", "on", "opened", "prepared", "seconds_of"]

DEPTH, N_TOKENS = 512, 4
"""Tokens before those that are timed one by one, and number of those."""

Step = Callable[[], object]


def on(n_threads: int) -> Callable[[Any], None]:
    """Return a function that sets the number of threads in ``llama_context_params``."""

    def edit(params: Any) -> None:
        params.n_threads = params.n_threads_batch = n_threads

    return edit


def prepared(context: Batches, what: int | str) -> tuple[Step, Step]:
    """Return a function that evaluates tokens, and one that restores the state before it.

    Args:
        context: Context to evaluate in.
        what: Length of a prompt, or ``"token"`` for ``N_TOKENS`` single tokens after ``DEPTH``.
    """
    if what == "token":
        context.clear()
        context.prefill(DEPTH)
        return functools.partial(context.generate, N_TOKENS), functools.partial(context.cut, DEPTH)
    return functools.partial(context.prefill, int(what)), context.clear


def claiming(stack: contextlib.ExitStack) -> Claimer:
    """Activate a plugin that claims weights, until the stack is closed."""
    claimer = Claimer()
    stack.enter_context(activate({"on_error": "raise", "plugins": {}}, {"bench": claimer}))
    return claimer


def opened(
    stack: contextlib.ExitStack, claimer: Claimer, variant: Variant, n_threads: int
) -> tuple[Batches, NativeContext]:
    """Open a context of the variant; return it and its native context, which sets the level."""
    claimer.claims = variant.claims()
    model = stack.enter_context(loaded(variant.path))
    return stack.enter_context(batches(model, on(n_threads))), claimer.contexts[-1]


def seconds_of(run: Step, before: Step) -> float:
    """Return the seconds that ``run`` takes after ``before``."""
    before()
    started = time.perf_counter()
    run()
    return time.perf_counter() - started

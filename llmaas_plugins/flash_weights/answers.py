"""Rule of the sparse mode: only answers are sparse; prompts and everything else are exact.

An answer begins with the first token that a request samples, and ends with the request. Batch sizes
do not identify an answer: the last token of a prompt may come alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from llmaas_hooks import NativeContext, Request, forks

__all__ = ["Answers"]

_NAME = "flash_weights"


@dataclass(slots=True)
class _Context:
    """Context in the sparse mode.

    Attributes:
        native: Native context, where sparse tokens are switched on.
        request: Request that the context serves; None between requests.
        draft_model: Draft model that was taken from the request's ``Llama``.
        n_blocks: Number of open blocks of ``Answers.block``.
    """

    native: NativeContext
    request: Request | None = None
    draft_model: Any = None
    n_blocks: int = 0


class Answers:
    """Contexts in the sparse mode, and which of them are answering.

    Attributes:
        n_without_drafts: Number of requests whose draft model was disabled. Tokens that are
            verified together would be computed exactly, so drafts would change the text.
    """

    def __init__(self) -> None:
        """Start without contexts."""
        self._contexts: dict[int, _Context] = {}
        self._lock = forks.lock()
        self.n_without_drafts = 0

    def add(self, native: NativeContext) -> None:
        """Track a new context."""
        with self._lock:
            self._contexts[native.ctx] = _Context(native)

    def forget(self, ctx: int) -> None:
        """Stop tracking a context that is about to be freed."""
        with self._lock:
            self._contexts.pop(ctx, None)

    def begin(self, request: Request) -> None:
        """Compute a request's prompt exactly."""
        with self._lock:
            context = self._contexts.get(request.engine.ctx)
            if context is not None:
                context.request = request
                context.native.sparse_tokens = False

    def resume(self, request: Request, n_generated: int) -> None:
        """Compute as before another request used the context."""
        self.begin(request)
        if n_generated:
            self.sampled(request.engine.ctx)

    def sampled(self, ctx: int) -> None:
        """Compute sparsely from now on, because the request in progress sampled a token."""
        context = self._contexts.get(ctx)
        if context is None or context.request is None or context.native.sparse_tokens:
            return
        with self._lock:
            request = context.request
            if request is None or _NAME in request.declined:
                return
            context.native.sparse_tokens = True
            llama = request.engine.llama
            if llama.draft_model is not None:
                context.draft_model, llama.draft_model = llama.draft_model, None
                self.n_without_drafts += 1

    def end(self, request: Request) -> None:
        """Compute exactly again, and restore the draft model."""
        with self._lock:
            context = self._contexts.get(request.engine.ctx)
            if context is None or context.request is not request:
                return
            context.request = None
            context.native.sparse_tokens = context.n_blocks > 0
            draft_model, context.draft_model = context.draft_model, None
            if draft_model is not None and request.engine.llama.draft_model is None:
                request.engine.llama.draft_model = draft_model

    @contextlib.contextmanager
    def block(self, ctx: int) -> Iterator[None]:
        """Compute single tokens sparsely that the app evaluates itself inside the block."""
        self._open(ctx, 1)
        try:
            yield
        finally:
            self._open(ctx, -1)

    def _open(self, ctx: int, n: int) -> None:
        with self._lock:
            context = self._contexts.get(ctx)
            if context is None:
                return
            context.n_blocks += n
            if context.request is None:
                with contextlib.suppress(ReferenceError):  # the suite ended inside the block
                    context.native.sparse_tokens = context.n_blocks > 0

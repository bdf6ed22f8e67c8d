"""Models that a plugin loads for itself, and contexts that it makes of an app's model.

For a plugin's own models, such as one that scores words, no hook fires: plugins neither claim their
weights nor serve their contexts. A plugin's own context of an app's model computes what the app's
contexts compute, so hooks fire, but it serves no requests (``ContextCreate.is_own``). The host
frees both in the order of all others.
"""

from __future__ import annotations

import contextvars
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

__all__ = ["are_loaded_here", "are_made_here", "own_contexts", "own_models"]

_is_here: contextvars.ContextVar[bool] = contextvars.ContextVar("llmaas_own_models", default=False)
_is_own: contextvars.ContextVar[bool] = contextvars.ContextVar("llmaas_own_contexts", default=False)


def own_models() -> AbstractContextManager[None]:
    """Load models and create contexts inside the block for the plugin itself."""
    return _inside(_is_here)


def own_contexts() -> AbstractContextManager[None]:
    """Create contexts of an app's model inside the block for the plugin itself."""
    return _inside(_is_own)


def are_made_here() -> bool:
    """Return whether this thread or task is inside a block of ``own_contexts``."""
    return _is_own.get()


def are_loaded_here() -> bool:
    """Return whether this thread or task is inside a block of ``own_models``."""
    return _is_here.get()


@contextmanager
def _inside(block: contextvars.ContextVar[bool]) -> Iterator[None]:
    token = block.set(True)
    try:
        yield
    finally:
        block.reset(token)

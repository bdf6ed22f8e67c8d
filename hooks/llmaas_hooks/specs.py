"""Every hook, and nothing else.

Each docstring answers: when it is called, on which thread, at what cost, what is returned, and
what an exception, or a result of another type, does. All arguments are passed by name; an
implementation may take fewer.
"""

# mypy: disable-error-code="empty-body"
from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llmaas_hooks.markers import hookspec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from llmaas_hooks.native import NativeContext, TensorInfo, WeightClaim
    from llmaas_hooks.types import (
        ContextCreate,
        DecodeStep,
        KVRestored,
        Levels,
        LogitsView,
        ModelLoad,
        Request,
        RequestStats,
        Tokens,
    )

__all__ = [
    "llmaas_context_create",
    "llmaas_context_free",
    "llmaas_decode",
    "llmaas_kv_evict",
    "llmaas_kv_restore",
    "llmaas_kv_save",
    "llmaas_level",
    "llmaas_logits",
    "llmaas_model_load",
    "llmaas_native_context",
    "llmaas_request_begin",
    "llmaas_request_end",
    "llmaas_shutdown",
    "llmaas_status",
    "llmaas_weights",
]


@hookspec
def llmaas_model_load(load: ModelLoad) -> None:
    """Edit the parameters of a model before libllama opens its file.

    When: inside ``llama_model_load_from_file``, before the original is called.
    Thread: the app's. Cost: once a model; may take milliseconds.
    Errors: with ``on_error = "log"`` the model loads with the parameters as they are then.
    """


@hookspec
def llmaas_weights(load: ModelLoad, tensors: Mapping[str, TensorInfo]) -> list[WeightClaim]:
    """Claim weights of a model: where their bytes are, or which part of them is used.

    When: after ``llmaas_model_load``, before libllama opens the file. ``tensors`` are all that its
    files have, by name; ``load.params`` may still be edited.
    Thread: the app's. Cost: once a model; may take milliseconds.
    Returns: the claims; none for a model the plugin leaves alone. Two plugins that claim the same
        property of a weight are a ``ConfigError`` to the app, which names both.
    Errors: with ``on_error = "log"``, a claim that cannot be met is left out, or the model is
        loaded without any.
    """


@hookspec
def llmaas_context_create(create: ContextCreate) -> None:
    """Edit the parameters of a context before it exists.

    When: inside ``llama_init_from_model``, before the original is called.
    Thread: the app's. Cost: once a context; may take milliseconds.
    Errors: with ``on_error = "log"`` the context is created with the parameters as they are then.
    """


@hookspec
def llmaas_native_context(context: NativeContext) -> None:
    """Use a new context's hook point in the engine: subscribe taps, choose levels.

    When: inside ``llama_init_from_model``, after the original; the object may be kept and used
    until the context is freed.
    Thread: the app's. Cost: once a context. What is subscribed costs on each batch.
    Errors: with ``on_error = "log"`` the context is used as it is then.
    """


@hookspec
def llmaas_context_free(ctx: int) -> None:
    """Let go of what depends on a context, or on its model.

    When: before the context is freed and after deferred work. The model may be freed next. Not at
    the end of the suite: ``llmaas_shutdown`` is.
    Thread: the app's, inside ``llama_free``; or the lane's, where the app cannot wait. Never inside
    the garbage collector. Cost: once a context; may take milliseconds.
    Errors: always logged; the context is freed.
    """


@hookspec
def llmaas_decode(step: DecodeStep) -> None:
    """Observe a batch that was evaluated.

    When: after ``llama_decode`` returned 0. Not called for evaluation that C code starts itself.
    Thread: the app's. Cost: once a batch: microseconds.
    Errors: with ``on_error = "log"`` counted after one log line.
    """


@hookspec
def llmaas_logits(view: LogitsView) -> None:
    """Edit logits in place before they are sampled.

    When: inside ``llama_sampler_sample``, before penalties, grammar and every other sampler.
    Thread: the app's. Cost: once a sampled token: tens of microseconds.
    Errors: with ``on_error = "log"`` the token is sampled from the logits as they are then.
    """


@hookspec(firstresult=True)
def llmaas_level(request: Request) -> Levels | None:
    """Choose how much of an elastic model a request computes with.

    When: first step of ``Llama.generate``, before ``llmaas_request_begin``. What the app itself
        asks for goes before it, and what is configured comes behind it.
    Thread: the app's. Cost: once a request; its first token waits for it.
    Returns: the levels, one of them or both; None leaves the choice to the next plugin. Of several
        answers the first counts.
    Errors: with ``on_error = "log"`` as if it had returned None.
    """


@hookspec
def llmaas_request_begin(request: Request, levels: Levels | None) -> None:
    """Learn that a request starts.

    When: first step of ``Llama.generate``, before any KV cell is touched. ``levels`` are what
        ``llmaas_level`` returned.
    Thread: the app's. Cost: once a request; may take milliseconds.
    Errors: with ``on_error = "log"`` the request goes on.
    """


@hookspec(firstresult=True)
def llmaas_kv_restore(request: Request) -> KVRestored | None:
    """Bring back KV cells for the longest stored prefix of the prompt.

    When: after ``llmaas_request_begin`` of a ``Llama.generate(reset=True)``.
    Thread: the app's, which owns the engine then. Cost: the switch latency.
    Returns: what sequence 0 holds now, or None when the plugin left the cells as they were.
    Errors: the engine's cells are dropped, no other plugin is asked, and the whole prompt is
        evaluated.
    """


@hookspec
def llmaas_kv_save(request: Request, tokens: Tokens) -> None:
    """Take KV cells out ahead of time.

    When: a request ended, also when it failed or its generator was closed early, at the latest when
    the next one begins; not when the app closed or dropped its ``Llama`` first.
    ``tokens`` are the tokens of sequence 0's cells, shape ``(n,)`` int32.
    Thread: the app's; work belongs into ``request.engine.defer``.
    Errors: with ``on_error = "log"`` nothing is saved; the context can still be recomputed.
    """


@hookspec
def llmaas_kv_evict(context_id: str) -> int:
    """Forget a persistent context in every tier.

    When: the context was deleted. Thread: any. Cost: milliseconds.
    Returns: bytes of KV that were freed; what other contexts share stays.
    Errors: raised to the caller after all plugins were called: a deletion must not fail silently.
    """


@hookspec
def llmaas_request_end(request: Request, stats: RequestStats) -> None:
    """Learn how a request went.

    When: after ``llmaas_kv_save``. Thread: the app's. Cost: microseconds.
    Errors: with ``on_error = "log"`` counted after one log line.
    """


@hookspec
def llmaas_status() -> dict[str, Any]:
    """Report which mode runs, and its counters.

    When: somebody asks (``Suite.status()``, ``/v1/llmaas/status``). Thread: any.
    Returns: a dict of plain JSON types.
    Errors: with ``on_error = "log"`` its report is ``{"error": …}``; the others' are whole.
    """


@hookspec
def llmaas_shutdown() -> None:
    """Finish background work and close files.

    When: the suite is deactivated, after the patches were reverted. Thread: the app's.
    Errors: logged; the other plugins are still shut down.
    """

"""Specifications of all hooks.

Each docstring says when the hook is called, on which thread, at what cost, and what it returns.
"Errors" says what follows when a plugin raises, or returns another type than the specification
says. The host passes all arguments by name; an implementation may take fewer of them.

``on_error`` is the setting of the activation: "log" (the default) logs a plugin's error and lets
the app's call continue; "raise" raises the error to the app. An ``UnmetBudgetError`` is always
raised to the app.
"""

# mypy: disable-error-code="empty-body"
from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llmaas_hooks.markers import hookspec

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from llmaas_hooks.drafts import Drafter, Guess
    from llmaas_hooks.levels import Levels
    from llmaas_hooks.memory import MemoryClaim
    from llmaas_hooks.native import NativeContext, TensorInfo, WeightClaim
    from llmaas_hooks.promises import RequestCost
    from llmaas_hooks.request_scope import RequestScope
    from llmaas_hooks.request_stats import RequestStats
    from llmaas_hooks.seats import Seat
    from llmaas_hooks.types import (
        ContextCreate,
        DecodeStep,
        KVRestored,
        LogitsView,
        ModelLoad,
        Request,
        Tokens,
    )

__all__ = [
    "llmaas_app_batch",
    "llmaas_context_create",
    "llmaas_context_free",
    "llmaas_cost",
    "llmaas_decode",
    "llmaas_draft",
    "llmaas_kv_evict",
    "llmaas_kv_restore",
    "llmaas_kv_save",
    "llmaas_level",
    "llmaas_logits",
    "llmaas_memory",
    "llmaas_model_load",
    "llmaas_model_path",
    "llmaas_native_context",
    "llmaas_prefill",
    "llmaas_request_begin",
    "llmaas_request_end",
    "llmaas_request_resume",
    "llmaas_request_switch",
    "llmaas_shorten",
    "llmaas_shutdown",
    "llmaas_status",
    "llmaas_together",
    "llmaas_turn",
    "llmaas_weights",
]


@hookspec
def llmaas_model_load(load: ModelLoad) -> None:
    """Edit the parameters of a model before libllama opens its file.

    When: inside ``llama_model_load_from_file``, before the original function runs.
    Thread: the app's. Cost: once a model; may take milliseconds.
    Errors: with ``on_error = "log"`` the model loads with the parameters as edited so far.
    """


@hookspec
def llmaas_model_path(path: str) -> str | None:
    """Name the file to load in place of a model's, such as one that was made of it.

    When: inside ``llama_model_load_from_file``, before ``llmaas_model_load``.
    Thread: the app's. Cost: once a model; may take seconds, such as to identify a file.
    Returns: the path of another file, or None. The first plugin that names one decides. LoRA
        adapters are then refused, because they were made for the app's file.
    Errors: with ``on_error = "log"`` the app's file is loaded.
    """


@hookspec
def llmaas_weights(load: ModelLoad, tensors: Mapping[str, TensorInfo]) -> list[WeightClaim]:
    """Claim weights of a model: choose where their bytes are, or which part of them is used.

    When: after ``llmaas_model_load``, before libllama opens the file. ``tensors`` has every tensor
        of the model's files by name. ``load.params`` may still be edited.
    Thread: the app's. Cost: once a model; may take milliseconds.
    Returns: the claims; an empty list for a model that the plugin leaves alone. If two plugins
        claim the same property of a weight, the app gets a ``ConfigError`` that names both plugins.
    Errors: with ``on_error = "log"`` a claim that matches no weight is left out. If another claim
        cannot be met, the model is loaded, or the context made, without any claims. After a model
        was loaded with a claimed source, a context that cannot meet every claim is an error to the
        app in either case.
    """


@hookspec
def llmaas_context_create(create: ContextCreate) -> None:
    """Edit the parameters of a context before it exists.

    When: inside ``llama_init_from_model``, before the original function runs.
    Thread: the app's. Cost: once a context; may take milliseconds.
    Errors: with ``on_error = "log"`` the context is created with the parameters as edited so far.
    """


@hookspec
def llmaas_native_context(context: NativeContext) -> None:
    """Set up a new context's hook point in the engine: subscribe taps, choose levels.

    When: inside ``llama_init_from_model``, after the original function returned. The plugin may
        keep ``context`` and use it until the context is freed.
    Thread: the app's. Cost: once a context. Each subscription costs time on every batch.
    Errors: with ``on_error = "log"`` the context is used with the settings made so far.
    """


@hookspec
def llmaas_context_free(ctx: int) -> None:
    """Release everything that depends on a context, or on its model.

    When: after deferred work is done and before the context is freed; its model may be freed next.
        The end of the suite calls ``llmaas_shutdown`` instead, also for contexts that still exist.
    Thread: the app's, inside ``llama_free``; or the background thread, where the app cannot wait.
        Never inside the garbage collector.
    Cost: once a context; may take milliseconds.
    Errors: always logged; the context is freed.
    """


@hookspec
def llmaas_app_batch(ctx: int, scope: RequestScope) -> None:
    """Prepare for a batch that the app evaluates itself, outside of requests.

    When: before ``llama_decode`` and after ``Llama.reset``, on a context that serves no request.
        ``scope`` has the blocks that are open in the thread or task that calls.
    Thread: the app's. Cost: once a batch; at most microseconds.
    Errors: with ``on_error = "log"`` the batch is evaluated.
    """


@hookspec
def llmaas_prefill(step: DecodeStep) -> None:
    """Observe a batch of several tokens that was evaluated.

    When: after ``llama_decode`` returned 0, before ``llmaas_decode``. Decoding single tokens does
        not call it, and costs nothing.
    Thread: the app's. Cost: once a batch of several tokens; at most microseconds.
    Errors: as those of ``llmaas_decode``.
    """


@hookspec
def llmaas_decode(step: DecodeStep) -> None:
    """Observe a batch that was evaluated, even of one token.

    When: after ``llama_decode`` returned 0. Evaluation that C code starts itself is not reported.
    Thread: the app's. Cost: once a batch; at most microseconds.
    Errors: with ``on_error = "log"`` the first error is logged; later ones are counted.
    """


@hookspec
def llmaas_logits(view: LogitsView) -> None:
    """Edit logits in place before they are sampled.

    When: inside ``llama_sampler_sample``, before penalties, grammar and every other sampler.
    Thread: the app's. Cost: once a sampled token; at most tens of microseconds.
    Errors: with ``on_error = "log"`` the token is sampled from the logits as edited so far.
    """


@hookspec
def llmaas_cost(request: Request) -> RequestCost | None:
    """Predict times of a request that has not begun.

    When: a plugin that plans a request asks, inside ``llmaas_level``. Nothing may be changed.
    Thread: the app's. Cost: once a planned request, and its first token waits for it; at most
        milliseconds.
    Returns: the prompt tokens that need no evaluation and the seconds until they are ready, or the
        times of each level, or shorter prompts to read instead; None if the plugin knows nothing of
        these. The host adds up all answers.
    Errors: with ``on_error = "log"`` the failed plugin counts as if it had returned None.
    """


@hookspec
def llmaas_level(request: Request, cost: Callable[[], RequestCost]) -> Levels | None:
    """Choose how much of an elastic model a request computes with, and how much of its prompt.

    When: first step of ``Llama.generate``, before ``llmaas_request_begin``. A level that the app
        requests takes precedence over the answer. The answer takes precedence over the configured
        level. ``cost`` asks all plugins what the request will take (``llmaas_cost``), once.
    Thread: the app's. Cost: once a request, and the request's first token waits for it.
    Returns: ``Levels`` with one or both levels set, or None to leave the choice to the next plugin.
        For the prompt and for the reply each, the first level that is not None counts. The level of
        the reply may be replaced when the first token's logits are there (``at_first_token``), and
        when it goes on after other requests (``at_resume``).
    Errors: with ``on_error = "log"`` the failed plugin counts as if it had returned None.
    """


@hookspec
def llmaas_shorten(request: Request, share: float | None) -> Tokens | None:
    """Choose the tokens of a prompt that a request reads.

    When: after ``llmaas_level`` and before ``llmaas_request_begin`` of a
        ``Llama.generate(reset=True)``. The call does not come if the app reads tokens or their
        logits, because it would count on their positions. ``share`` is the share of the tokens that
        the app asks for (``Levels.prompt_share``), or else the answer of ``llmaas_level``; None
        leaves it to the plugin.
    Thread: the app's. Cost: once a request, and its first token waits for it. The plugin may
        evaluate tokens on the engine, whose cells it then drops. It calls ``request_scope.check``
        between the parts of long work, which raises if the request is over.
    Returns: the tokens to read, shape ``(n,)`` int32, fewer than the prompt has; None for all. The
        first plugin that returns tokens decides. Later hooks get a request with these tokens, of
        which ``whole`` is this one.
    Errors: with ``on_error = "log"`` the failed plugin counts as if it had returned None.
    """


@hookspec
def llmaas_request_begin(request: Request, levels: Levels | None) -> None:
    """Observe the start of a request.

    When: first step of ``Llama.generate``, before any KV cell is touched. ``levels`` is the result
        of ``llmaas_level``.
    Thread: the app's. Cost: once a request; may take milliseconds.
    Errors: with ``on_error = "log"`` the request continues.
    """


@hookspec
def llmaas_draft(request: Request, guess: Guess) -> Drafter | None:
    """Offer drafts for a request: tokens that the model verifies several at a time.

    When: after the request's cells were restored. The hook is not called if the app has a draft
        model of its own, reads tokens (``Request.reads_tokens``), or if the engine cannot remove
        tokens. Between tokens, the host asks each drafter for a proposal and lets the one with the
        largest gain make a draft. The model keeps the tokens that it would have sampled itself.
    Thread: the app's. Cost: once a request; a proposal, once a token, takes microseconds.
    Returns: a drafter, which is asked until the request's end, or None.
    Errors: with ``on_error = "log"`` the failed plugin counts as if it had returned None.
    """


@hookspec
def llmaas_turn(request: Request, n_left: int, seat: Seat | None) -> int | None:
    """Let other requests use the engine before a request goes on.

    When: before each part of a prompt is evaluated, and before each token after the first. The
        implementation may let another thread make requests on the same engine, and return when it
        is this request's turn again. The host then saves the request's cells and restores them. The
        hook is called only if a plugin keeps these cells (``Engine.keeps_cells``), ``Llama`` itself
        records what they hold, and no logits are kept that another request would replace.
        With a ``seat``, the implementation may put the request aside before others use the engine,
        evaluate its next token together with theirs, and must bring it back before it returns.
        ``seat`` is None if the request cannot be put aside, such as for plugins that set an engine
        up for a request and do not implement ``llmaas_request_switch``.
    Thread: the app's. Cost: once a token; microseconds, unless others use the engine.
    Returns: the most prompt tokens to evaluate before the next turn, or None for all. ``n_left`` is
        the number of prompt tokens that remain to be evaluated, 0 in an answer. The least of all
        answers counts.
    Errors: with ``on_error = "log"`` the failed plugin counts as if it had returned None.
    """


@hookspec
def llmaas_together(request: Request, n_tokens: int, begins: bool) -> None:
    """Observe that a request lies aside for others, or has sequence 0 to itself again.

    When: in ``llmaas_turn``, first with ``begins``, while sequence 0 holds the request's
        ``n_tokens`` tokens and no other request was there; then without, when it holds them again,
        or more. In between, the engine evaluates tokens of several requests, of which
        ``llmaas_prefill`` is not told. The cells keep their places meanwhile.
    Thread: the app's. Cost: twice each time that a request lies aside; at most microseconds.
    Errors: with ``on_error = "log"`` the request continues.
    """


@hookspec
def llmaas_request_resume(request: Request, levels: Levels | None, n_generated: int) -> None:
    """Observe that a request goes on after other requests used its engine.

    When: inside ``llmaas_turn``, after the other requests ended or were put aside, and before the
        request's cells are restored. ``levels`` is what ``llmaas_request_begin`` was told, and
        ``n_generated`` the number of tokens that were sampled so far. A plugin that sets an engine
        up for a request in ``llmaas_request_begin`` does so again. Cells of a prompt that were lost
        are evaluated between two further calls, the first of them with 0 generated tokens.
    Thread: the app's. Cost: once an interruption; at most milliseconds.
    Errors: with ``on_error = "log"`` the request continues.
    """


@hookspec
def llmaas_request_switch(request: Request) -> None:
    """Set an engine up for another one of the requests that lie aside.

    When: inside ``llmaas_turn``, as a request comes back from its seat, and before a batch of the
        next tokens of several requests, for one of them: all are computed at the same level. The
        request's cells and the logits of its last token are kept, so nothing is evaluated again.
        A plugin that sets an engine up for a request (``llmaas_request_resume``), or edits its
        logits (``llmaas_logits``), implements this hook too, or else no request can lie aside.
    Thread: the app's. Cost: about twice a token; at most microseconds.
    Errors: with ``on_error = "log"`` the request continues.
    """


@hookspec(firstresult=True)
def llmaas_kv_restore(request: Request) -> KVRestored | None:
    """Restore KV cells for the longest stored prefix of the prompt.

    When: after ``llmaas_request_begin`` of a ``Llama.generate(reset=True)`` whose prompt fits into
        the context. The call does not come if ``Llama`` reuses cells that the app changed on its
        own.
    Thread: the app's, which owns the engine meanwhile. Cost: the switch latency.
    Returns: the number of prompt tokens whose cells sequence 0 holds now, or None if the plugin
        changed no cells. The first plugin that does not return None ends the search.
    Errors: the engine's cells are dropped, no other plugin is asked, and the whole prompt is
        evaluated.
    """


@hookspec
def llmaas_kv_save(request: Request, tokens: Tokens, is_over: bool) -> None:
    """Save the KV cells of a request that ended, or that another request interrupts.

    When: a request ended, also by an error or because its generator was closed early. The call
        comes at the latest when the engine's next request begins. It does not come if the app
        closed or dropped its ``Llama`` first, or changed the cells on its own. ``tokens`` are the
        tokens in the cells of sequence 0, shape ``(n,)`` int32. ``is_over`` is False if the request
        goes on after another one.
    Thread: the app's or the background thread. Pass slow work to ``request.engine.defer``.
    Errors: with ``on_error = "log"`` nothing is saved; the context can still be recomputed.
    """


@hookspec
def llmaas_kv_evict(context_id: str) -> int:
    """Erase all that is kept of a persistent context, such as its KV cache in every tier.

    When: the context was deleted. Thread: any. Cost: milliseconds.
    Returns: bytes of KV cache that were freed; bytes that other contexts share stay.
    Errors: raised to the caller after all plugins were called: a deletion must not fail silently.
    """


@hookspec
def llmaas_request_end(request: Request, stats: RequestStats) -> None:
    """Observe the end of a request.

    When: after ``llmaas_kv_save``, once for every request, also where that hook is not called.
    Thread: as for ``llmaas_kv_save``, or as for ``llmaas_context_free``. Cost: microseconds.
    Errors: with ``on_error = "log"`` the first error is logged; later ones are counted.
    """


@hookspec
def llmaas_memory() -> list[MemoryClaim]:
    """Tell which memory the plugin can give back, or make use of, and what it is worth.

    When: twice a second while the configuration has a memory budget, and for the status. Thread:
        any, while requests may be running.
    Cost: at most a millisecond.
    Returns: the claims; an empty list while the plugin holds no memory. Their memory is resized
        (``MemoryClaim.resize``) where another division saves more time. The host takes ``held`` for
        memory that it can divide only if the plugin also tells ``process_memory`` of it.
    Errors: always logged; the plugin's memory is left as it is.
    """


@hookspec
def llmaas_status() -> dict[str, Any]:
    """Report the plugin's mode and its counters.

    When: ``Suite.status()`` or ``/v1/llmaas/status`` is called. Thread: any.
    Returns: a dict of plain JSON types.
    Errors: with ``on_error = "log"`` the plugin's report is ``{"error": …}``; other plugins'
        reports are complete.
    """


@hookspec
def llmaas_shutdown() -> None:
    """Finish background work and close files.

    When: the suite is deactivated, after the patches were reverted. Thread: the app's.
    Errors: logged; the other plugins are still shut down.
    """

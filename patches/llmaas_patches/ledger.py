"""Which cells of a context are what ``Llama``'s own books say they are.

The books (``n_tokens``, ``input_ids``) name the tokens of sequence 0. An app may put other cells
there, and ``Llama`` is not told: images, batches of its own, shifted positions, a state from
elsewhere. Whatever it goes on with is its affair, as ever; but such cells must not be stored under
the names of the tokens that ``Llama`` believes in.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from llama_cpp import Llama, LlamaState, llama_cpp

from llmaas_patches.scope import serving_app

if TYPE_CHECKING:
    from llmaas_patches.host import Host

__all__ = [
    "Around",
    "Change",
    "Known",
    "Ledger",
    "address",
    "around_everything",
    "wrap_altering",
    "wrap_changing",
    "wrap_eval",
    "wrap_load_state",
    "wrap_reset",
    "wrap_save_state",
    "wrap_whole",
]

Function = Callable[..., Any]
Change = Callable[..., int | None]
"""First position of sequence 0 that a call with these arguments changes; None: it changes none."""
Around = Callable[["Ledger", Function, tuple[Any, ...]], Any]
"""Makes an app's call on a context to which plugins added sequences."""


class Known(NamedTuple):
    """Facts about a saved state; the attributes are those of ``Ledger``."""

    n_explained: int
    sparse_from: int | None
    app: str | None


class Ledger:
    """Notes on one context.

    Attributes:
        handles: Addresses of the context and, if it has one, of its memory.
        app_n_seq_max: Sequences the app asked for.
        app_n_ctx: Cells that are the app's.
        n_spare: Cells that plugins added to the context.
        hides: Plugins added sequences to the context.
        parked: Sequences that hold a plugin's cells between calls.
        is_lent: The calls that come now are a plugin's.
        n_explained: Leading tokens in ``Llama``'s books whose cells it evaluated itself, or that a
            plugin restored.
        sparse_from: First position of sequence 0 whose cell was computed with the largest values
            only; None: there is none.
        alterations: Calls by which the computation of cells was changed, or plugins' sequences
            taken; the binding's names.
        is_evaluating: ``Llama.eval`` is running.
        app: App whose tokens ``Llama``'s books name; None if it has no name.
        due: Work that is due at the end of each open request.
        is_closed: The context is about to go.
    """

    def __init__(self, handles: tuple[int, ...], app_n_seq_max: int, app_n_ctx: int) -> None:
        """Nothing is explained yet, and nothing hidden."""
        self.handles = handles
        self.app_n_seq_max = app_n_seq_max
        self.app_n_ctx = app_n_ctx
        self.n_spare = 0
        self.hides = False
        self.parked: set[int] = set()
        self.is_lent = False
        self.n_explained = 0
        self.sparse_from: int | None = None
        self.alterations: list[str] = []
        self.is_evaluating = False
        self.app: str | None = None
        self.due: list[Callable[[], None]] = []
        self.is_closed = False

    def close(self) -> None:
        """End the requests that are open; their generators find nothing left to do.

        Those that end later would be taken for requests of another context at the same address.
        """
        self.is_closed = True
        while self.due:
            try:
                end = self.due.pop(0)
            except IndexError:  # another thread has ended it
                return
            end()

    def changed(self, start: int | None) -> None:
        """Cells of sequence 0 from position ``start`` on are not what they were."""
        if start is None:
            return
        if start < self.n_explained:
            self.n_explained = max(start, 0)
        if self.sparse_from is not None and start <= self.sparse_from:
            self.sparse_from = None

    def evaluated_sparsely(self, start: int) -> None:
        """Cells from position ``start`` on are good for the answer that they belong to only."""
        if self.sparse_from is None or start < self.sparse_from:
            self.sparse_from = start

    def decoded(self, batch: Any) -> None:
        """A ``llama_decode`` is about to run."""
        if not self.is_evaluating:
            n_tokens = int(batch.n_tokens)
            known = batch.pos and n_tokens > 0
            self.changed(min(batch.pos[i] for i in range(n_tokens)) if known else 0)

    def is_full(self, batch: Any) -> bool:
        """Whether ``Llama`` is about to evaluate more tokens than the app's context has cells.

        Only there is it certain that each position below has a cell.
        """
        n_tokens = int(batch.n_tokens)
        return bool(
            self.is_evaluating and n_tokens > 0 and batch.pos[n_tokens - 1] >= self.app_n_ctx
        )

    @contextmanager
    def lent(self) -> Iterator[None]:
        """The calls inside the block are not the app's."""
        was_lent, self.is_lent = self.is_lent, True
        try:
            yield
        finally:
            self.is_lent = was_lent

    def give_up_parked(self) -> None:
        """Free the cells that plugins keep, before a call that would show or change them."""
        with self.lent():
            while self.parked:
                llama_cpp.llama_memory_seq_rm(self.handles[-1], self.parked.pop(), -1, -1)

    def claimed(self, call: str) -> None:
        """The app uses a sequence it did not ask for, as llama.cpp lets it: all are its own now."""
        self.give_up_parked()
        self.alterations.append(call)


def address(handle: Any) -> Any:
    """A handle as an integer: apps may pass one wrapped in ``ctypes.c_void_p``."""
    return handle if type(handle) is int else getattr(handle, "value", handle)


def wrap_changing(host: Host, original: Function, change: Change, around: Around) -> Function:
    """Any call that changes a context's cells: wait for deferred work on it first, and note it."""
    return _noted(host, original, lambda ledger, args: ledger.changed(change(*args)), around)


def wrap_altering(host: Host, original: Function) -> Function:
    """Wrap a call that changes how a context computes cells: wait first, and note it."""
    name = original.__name__
    return _noted(
        host, original, lambda ledger, _: ledger.alterations.append(name), around_everything
    )


def wrap_whole(host: Host, original: Function) -> Function:
    """Wrap a call that reads all of a context's cells: wait for deferred work first."""
    return _noted(host, original, lambda *_: None, around_everything)


def around_everything(ledger: Ledger, original: Function, args: tuple[Any, ...]) -> Any:
    """A call that shows or replaces all cells finds the app's alone."""
    ledger.give_up_parked()
    return original(*args)


def _noted(
    host: Host,
    original: Function,
    note: Callable[[Ledger, tuple[Any, ...]], None],
    around: Around,
) -> Function:
    pending, settle, ledgers = host.lanes.pending, host.lanes.settle, host.ledgers

    @functools.wraps(original)
    def noted(handle: Any, *args: Any) -> Any:
        if pending:
            settle(address(handle))
        ledger = ledgers.get(address(handle))
        if ledger is not None:
            note(ledger, args)
            if ledger.hides and not ledger.is_lent:
                return around(ledger, original, (handle, *args))
        return original(handle, *args)

    return noted


def wrap_eval(host: Host, original: Function) -> Function:
    """``Llama.eval``: the one that keeps the books; its cells are explained if those before are."""
    ledgers = host.ledgers

    @functools.wraps(original)
    def eval(self: Llama, tokens: Any) -> None:  # noqa: A001  the original's name
        ledger = ledgers.get(address(self.ctx))
        if ledger is None:
            original(self, tokens)
            return
        start = self.n_tokens
        ledger.is_evaluating = True
        try:
            original(self, tokens)
        except BaseException:
            self._requires_eval = True  # the logits may be those of a batch that is in no book
            raise
        finally:
            ledger.is_evaluating = False
            if start <= ledger.n_explained:
                ledger.n_explained = self.n_tokens  # also after an error: of what went well
            if host.native is not None and host.native.is_sparse(address(self.ctx)):
                ledger.evaluated_sparsely(start)

    return eval


def wrap_reset(host: Host, original: Function) -> Function:
    """Wrap ``Llama.reset``: books that were emptied belong to the app that fills them."""

    @functools.wraps(original)
    def reset(self: Llama) -> None:
        original(self)
        ledger = host.ledgers.get(address(self.ctx))
        if ledger is not None:
            ledger.app = serving_app()

    return reset


def wrap_save_state(host: Host, original: Function) -> Function:
    """``Llama.save_state``: remember how much of it is explained."""

    @functools.wraps(original)
    def save_state(self: Llama) -> LlamaState:
        state = original(self)
        ledger = host.ledgers.get(address(self.ctx))
        if ledger is not None:
            n_explained = min(ledger.n_explained, state.n_tokens)
            host.states[state] = Known(n_explained, ledger.sparse_from, ledger.app)
        return state

    return save_state


def wrap_load_state(host: Host, original: Function) -> Function:
    """``Llama.load_state``: a state that this process did not save may be of other weights."""

    @functools.wraps(original)
    def load_state(self: Llama, state: LlamaState) -> None:
        original(self, state)
        ledger = host.ledgers.get(address(self.ctx))
        if ledger is not None:
            brought_along = Known(0, None, serving_app())
            known = host.states.get(state, brought_along)
            ledger.n_explained, ledger.sparse_from, ledger.app = known

    return load_state

"""Track which cells of a context hold the tokens that ``Llama`` has recorded.

``Llama`` records the tokens of sequence 0 in ``n_tokens`` and ``input_ids``. An app may change the
cells without ``Llama``'s knowledge: by images, its own batches, shifted positions, or a loaded
state. The app may continue from such cells, as without plugins. But they must not be stored under
the tokens that ``Llama`` recorded. Cells that do hold the recorded tokens are called *explained*.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from llama_cpp import llama_cpp

from llmaas_hooks import ParkedSequences

if TYPE_CHECKING:
    from llmaas_patches.seats import Seats

__all__ = [
    "Aside",
    "CellTracker",
    "Due",
    "Known",
    "address",
]

_APP = 0


class Known(NamedTuple):
    """Facts about a saved state, with the same meaning as in ``CellTracker``.

    Attributes:
        tracker: Tracker of the context that saved the state.
        n_alterations: Number of the tracker's ``alterations`` at that time.
    """

    tracker: CellTracker
    n_alterations: int
    n_explained: int
    sparse_from: int | None
    app: str | None


class Due(Protocol):
    """Work to do at the end of a request."""

    @property
    def is_paused(self) -> bool:
        """Whether the request's generator waits for the app."""

    def disown(self, context_id: str) -> None:
        """Save nothing if the request runs in this persistent context, which is being deleted."""

    def finish(self) -> None:
        """Do the work now, exactly once, as the request is over."""

    def __call__(self) -> None:
        """Do the work."""


class Aside(Due, Protocol):
    """End of a request that may lie aside while others use its context."""

    @property
    def is_lost(self) -> bool:
        """Whether the request's generator is gone, so that nothing goes on with it."""

    def give_up(self) -> None:
        """End the request if it lies aside."""


class CellTracker:
    """Facts about one context.

    Attributes:
        handles: Addresses of the context and, if it has one, of its memory.
        app_n_seq_max: Number of sequences that the app asked for.
        app_n_ctx: Number of cells that the app asked for.
        n_spare: Number of cells that plugins added.
        n_seat_cells: Number of those that are for requests aside.
        hides: Whether plugins added sequences that the app must not see.
        parked: Sequences that hold a plugin's cells between calls.
        must_free_parked: Whether ``parked`` must be freed as soon as no call uses the context.
        n_calls: Number of running calls that read or change cells, nested ones too. Several threads
            count here: one app's, and the background thread. Python changes threads only at calls
            and loops, so ``+= 1`` loses no count.
        is_lent: Whether the current calls are a plugin's.
        n_explained: Number of leading recorded tokens whose cells ``Llama`` evaluated or a plugin
            restored.
        sparse_from: First position of sequence 0 whose cell was computed sparsely, from the largest
            values only; None if there is none.
        alterations: Names of calls by which the app changed how cells are computed, or used a
            plugin's sequence.
        is_warming_up: Whether the engine uses all experts of a mixture, so that the cells that it
            evaluates cannot be explained.
        is_evaluating: Whether ``Llama.eval`` is running.
        app: App whose tokens ``Llama`` recorded; None if it has no name.
        due: Work to do at the end of each open request.
        aside: Ends of the requests that lie aside while others use the context.
        seats: Places of these requests; None if the context has none.
        is_closed: Whether the context is being freed.
    """

    def __init__(
        self,
        handles: tuple[int, ...],
        app_n_seq_max: int,
        app_n_ctx: int,
        settle: Callable[[], None] = lambda: None,
    ) -> None:
        """Start with no explained tokens and nothing hidden.

        Args:
            handles: Addresses of the context and of its memory.
            app_n_seq_max: Sequences that the app asked for.
            app_n_ctx: Cells that the app asked for.
            settle: Function that waits for deferred work on the context.
        """
        self._settle = settle
        self.handles = handles
        self.app_n_seq_max = app_n_seq_max
        self.app_n_ctx = app_n_ctx
        self.n_spare = self.n_seat_cells = 0
        self.hides = False
        self.parked = ParkedSequences()
        self.must_free_parked = False
        self.n_calls = 0
        self.is_lent = False
        self.n_explained = 0
        self.sparse_from: int | None = None
        self.alterations: list[str] = []
        self.is_warming_up = False
        self.is_evaluating = False
        self.app: str | None = None
        self.due: list[Due] = []
        self.aside: list[Aside] = []
        self.seats: Seats | None = None
        self.is_closed = False

    def close(self) -> None:
        """End all open requests, so that their generators find nothing left to do.

        A request that ended later would be taken for one of another context at the same address.
        """
        self.is_closed = True
        for ends in (self.due, self.aside):
            while ends:
                try:
                    end = ends.pop(0)
                except IndexError:  # another thread has ended it
                    return
                end()

    def of_plugins(self, n_seq_max: int) -> range:
        """Return the sequences that plugins added, without those of requests aside."""
        n_seats = 0 if self.seats is None else self.seats.n
        return range(self.app_n_seq_max, n_seq_max - n_seats)

    def put_aside(self, end: Aside) -> None:
        """Keep a request's end until the request uses the context again."""
        self.due.remove(end)
        self.aside.append(end)

    def bring_back(self, end: Aside) -> None:
        """Register the end of a request that was aside."""
        self.aside.remove(end)
        self.due.append(end)

    def make_way(self) -> None:
        """Let the app itself use sequence 0: a request aside whose cells are there leaves it."""
        if self.seats is not None and self.seats.seated is None and not self.is_lent:
            self.seats.vacate()

    def give_up_seats(self) -> None:
        """Let sequence 0 have the cells of the app's own request, before a call that names it."""
        if self.seats is not None:
            self.seats.give_up()

    def forget_aside(self, end: Aside) -> None:
        """Forget a request that is over, if it still lies aside."""
        if end in self.aside:
            self.aside.remove(end)

    def end_paused(self) -> None:
        """End the requests whose generators wait for the app, before the app uses the cells itself.

        Otherwise their ends would treat the app's own cells as theirs, and the app's batch would be
        computed at their levels.
        """
        for end in [end for end in self.due if end.is_paused]:
            end.finish()

    def end(self, end: Due) -> None:
        """Do the work at the end of a request, unless it is done or another thread does it.

        After Ctrl-C the request stays registered, and the next use of the context goes on with it.
        """
        if end not in self.due:
            return
        try:
            try:
                self.due.remove(end)
            except ValueError:  # another thread was first
                return
            end()
        except Exception:
            raise
        except BaseException:
            if not self.is_closed:
                self.due.append(end)
            raise

    def changed(self, start: int | None) -> None:
        """Record that the app's cells from position ``start`` on changed; None means none.

        They are sequence 0's, but for a request whose cells are elsewhere (``Seats.sequence``).
        """
        if start is None:
            return
        is_elsewhere = self.seats is not None and self.seats.sequence != _APP
        if start < self.parked.n_current and not is_elsewhere:
            self._cut_current(max(start, 0))
        if start < self.n_explained:
            self.n_explained = max(start, 0)
        if self.sparse_from is not None and start <= self.sparse_from:
            self.sparse_from = None

    def _cut_current(self, start: int) -> None:
        """Let the parked sequence that has sequence 0's cells lose those that are about to change.

        Otherwise they would stay in use.
        """
        sequence = self.parked.current
        if sequence in self.parked:
            with self.lent():
                llama_cpp.llama_memory_seq_rm(self.handles[-1], sequence, start, -1)
        self.parked.n_current = start  # last: Ctrl-C may come in between

    def evaluated_sparsely(self, start: int) -> None:
        """Record that cells from position ``start`` on are computed sparsely.

        Such cells are valid only for the answer that they belong to.
        """
        if self.sparse_from is None or start < self.sparse_from:
            self.sparse_from = start

    def refusal(self, batch: Any, n_tokens: int) -> int:
        """Record the cells that a ``llama_decode`` is about to change, unless it must not run.

        Args:
            batch: The ``llama_batch``.
            n_tokens: Its number of tokens. Each access of a field of a batch takes time.

        Returns:
            0 to let the batch run, else llama.cpp's status: -1 if the batch names a sequence that
            the app did not ask for, 1 if the context of the app's size is full.
        """
        if self.is_evaluating:
            if self.n_spare > 0:
                return int(self._is_full(batch, n_tokens))
            if self.parked and not self._has_room(batch, n_tokens):
                self.give_up_parked()
            return 0
        self.give_up_own()
        if self.hides and not (self.is_lent or self._takes(batch, n_tokens)):
            return -1
        positions = batch.pos
        if not positions or n_tokens < 1:
            self.changed(0)
        else:
            self.changed(positions[0] if n_tokens == 1 else min(positions[:n_tokens]))
        return 0

    def _takes(self, batch: Any, n_tokens: int) -> bool:
        """Return whether the app's context has all sequences of the app's own batch."""
        named = batch.seq_id
        if not named:
            return True
        counts, most = batch.n_seq_id, self.app_n_seq_max
        if n_tokens == 1 == counts[0]:
            return bool(named[0][0] < most)
        for i in range(n_tokens):
            sequences = named[i]
            for j in range(counts[i]):
                if sequences[j] >= most:
                    return False
        return True

    def _is_full(self, batch: Any, n_tokens: int) -> bool:
        """Return whether ``Llama`` is about to evaluate more tokens than the app's context holds.

        Only for ``Llama``'s own batches it is certain that every earlier position has a cell.
        """
        return n_tokens > 0 and bool(batch.pos[n_tokens - 1] >= self.app_n_ctx)

    def _has_room(self, batch: Any, n_tokens: int) -> bool:
        """Return whether ``Llama`` and all parked sequences fit into the app's own cells."""
        memory = self.handles[-1]
        parked = self.parked.others()
        ends = (llama_cpp.llama_memory_seq_pos_max(memory, sequence) for sequence in parked)
        n_parked = sum(end + 1 for end in ends)
        return n_tokens == 0 or bool(batch.pos[n_tokens - 1] < self.app_n_ctx - n_parked)

    def saved(self, n_tokens: int) -> Known:
        """Return facts about a state of this context with ``n_tokens`` tokens."""
        n_explained = min(self.n_explained, n_tokens)
        return Known(self, len(self.alterations), n_explained, self.sparse_from, self.app)

    def loaded(self, known: Known | None, app: str | None) -> None:
        """Record that a state was loaded.

        The cells of another context may be of another model, or of other settings, so they are
        unexplained. The same holds for a state whose origin is unknown.

        Args:
            known: Facts about the state; None if its origin is unknown.
            app: App that loads the state.
        """
        self.n_explained, self.sparse_from, self.app = 0, None, app
        if known is not None:
            self.sparse_from, self.app = known.sparse_from, known.app
            if known.tracker is self and known.n_alterations == len(self.alterations):
                self.n_explained = known.n_explained

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Treat calls inside the block as a plugin's.

        Deferred work is in such a block, too, on another thread. If both overlapped, the end of one
        would end the other.
        """
        self._settle()
        was_lent = self.is_lent
        try:
            self.is_lent = True
            yield
        finally:
            self.is_lent = was_lent

    def give_up_parked(self) -> None:
        """Free the cells in plugins' sequences, before a call that would show or change them."""
        with self.lent():
            for sequence in tuple(self.parked):
                llama_cpp.llama_memory_seq_rm(self.handles[-1], sequence, -1, -1)
        self.parked.clear()  # last: Ctrl-C may come in between

    def give_up_own(self) -> None:
        """Free plugins' sequences in the app's own cells, which the app is about to use itself."""
        if self.parked and not (self.n_spare or self.is_lent):
            self.give_up_parked()

    @contextmanager
    def in_call(self) -> Iterator[None]:
        """Keep other threads from freeing plugins' sequences inside the block."""
        self.n_calls += 1
        try:
            yield
        finally:
            self.n_calls -= 1

    def forget_calls(self) -> None:
        """Forget running calls and requests: they are another thread's, and this is a child."""
        self.n_calls = 0
        self.is_lent = self.is_evaluating = False
        self.due = [end for end in self.due if end.is_paused]
        if self.seats is not None and self.aside:
            self.seats.forget()
            self.aside.clear()
            self.n_explained = 0  # the records may be of a request whose cells are elsewhere

    def free_at_end(self) -> None:
        """Free plugins' sequences if the plugins have ended and nothing uses the context."""
        is_used = self.n_calls > 0 or any(not end.is_paused for end in self.due)
        if self.must_free_parked and not (is_used or self.is_closed):
            self.must_free_parked = False  # first, because freeing ends calls, which come here
            try:
                self.give_up_parked()
            finally:
                self.must_free_parked = bool(self.parked)  # after Ctrl-C

    def claimed(self, call: str) -> None:
        """Free plugins' sequences, because the app's call uses one that it did not ask for."""
        self.give_up_parked()
        self.alterations.append(call)


def address(handle: Any) -> Any:
    """Return a handle as an integer; apps may pass one wrapped in ``ctypes.c_void_p``."""
    return handle if type(handle) is int else getattr(handle, "value", handle)

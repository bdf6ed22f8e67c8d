"""Requests that lie aside: their cells in sequences of their own, their state in records.

``Llama`` serves one request at a time: it records one list of tokens, has one chain of samplers,
and keeps all cells in sequence 0. Requests that are decoded together take turns with it. One that
leaves stays in sequence 0 until another needs that sequence; then its cells get the label of a
sequence of their own. A request whose token was evaluated in a batch with others needs no cells in
order to sample: when it enters, ``Llama`` only gets its records, and ``llama_decode`` finds that
the token is evaluated already.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

from llama_cpp import _internals, llama_cpp

from llmaas_hooks import DecodeStep
from llmaas_hooks import Seat as AnySeat
from llmaas_patches.cell_tracker import Aside, CellTracker, address
from llmaas_patches.seat_records import SeatRecords

if TYPE_CHECKING:
    from llmaas_hooks import Request
    from llmaas_patches.drafting import Drafting
    from llmaas_patches.engine import LlamaEngine
    from llmaas_patches.host import Host

__all__ = ["Seat", "Seated", "Seats"]

_ENGINE_S = 0
"""Sequence of the request that ``Llama`` serves."""


class Seated(Aside, Protocol):
    """End of a request that may lie aside.

    Attributes:
        engine: Engine that serves the request.
        request: The request.
        drafting: Plugins' drafts for the request, or None.
    """

    engine: LlamaEngine
    request: Request
    drafting: Drafting | None


class Seats:
    """Seats of one context.

    Attributes:
        seated: Seat of the request that uses the engine and was aside before; None if the request
            that uses it has sequence 0 to itself.
        base: Seat of the request aside whose cells are still in sequence 0; None if there is none.
        n_batches: Number of the context's batches. Its outputs are those of the last one.
    """

    def __init__(self, sequences: range) -> None:
        """Use these sequences, one for each request aside."""
        self._sequences = sequences
        self._owners: dict[int, weakref.ref[Seat]] = {}
        self.seated: Seat | None = None
        self.base: Seat | None = None
        self.n_batches = 0
        self._beside: SeatRecords | None = None
        self._batch: Any = None

    def forget(self) -> None:
        """Forget requests of other threads: this is a child, which does not go on with them."""
        if self.seated is not None and self.seated.place != _ENGINE_S:
            with contextlib.suppress(ReferenceError):  # the parent freed the engine
                self.seated.engine.llama.n_tokens = 0  # these tokens' cells are elsewhere
        self.seated = self.base = self._beside = None

    @property
    def n(self) -> int:
        """Number of seats."""
        return len(self._sequences)

    @property
    def sequence(self) -> int:
        """Sequence that takes the place of sequence 0 in the app's calls."""
        return _ENGINE_S if self.seated is None else self.seated.place

    def keeps(self, start: Any, _: Any) -> bool:
        """Return whether the app drops cells from the next position on, before it evaluates it.

        If that token is evaluated already, its cell stays.
        """
        return self.seated is not None and self.seated.has_evaluated(address(start))

    def row(self, last: int) -> int:
        """Return the output row of the request that uses the engine; ``last`` without a seat."""
        row = None if self.seated is None else self.seated.row
        return last if row is None else row

    def give_up(self) -> None:
        """Let the engine be used without seats, before a call that needs all cells in their place.

        A request that sits on the engine takes sequence 0. One aside gives it up.
        """
        if self.seated is not None:
            self.seated.settle()
        elif self.base is not None:
            self.vacate()

    def vacate(self) -> None:
        """Give the cells in sequence 0 to the request aside that they belong to, if any."""
        base = self.base
        if base is None:
            return
        sequence = self._free_sequence(base)
        base.records = SeatRecords.of(base.engine, base.tracker)
        _relabel(base.tracker, _ENGINE_S, sequence)
        base.place, self.base = sequence, None
        SeatRecords.unused(base.engine).apply(base.engine, base.tracker)

    def swap_in(self, seat: Seat) -> None:
        """Give ``Llama`` the records of a request whose cells are elsewhere."""
        assert seat.records is not None
        self._beside = SeatRecords.of(seat.engine, seat.tracker)
        seat.records.apply(seat.engine, seat.tracker)

    def swap_out(self, seat: Seat) -> None:
        """Take the records of a request whose cells are elsewhere, and put the others back."""
        assert self._beside is not None
        seat.records = SeatRecords.of(seat.engine, seat.tracker)
        self._beside.apply(seat.engine, seat.tracker)
        self._beside = None

    def take_engine_s(self, seat: Seat) -> None:
        """Move a request's cells into sequence 0, whose own are dropped: they are no request's."""
        assert seat.records is not None
        seat.engine.settle()
        self.vacate()
        with seat.tracker.lent():
            llama_cpp.llama_memory_seq_rm(seat.tracker.handles[-1], _ENGINE_S, -1, -1)
        _relabel(seat.tracker, seat.place, _ENGINE_S)
        self._owners.pop(seat.place, None)
        seat.place = _ENGINE_S
        seat.records.apply(seat.engine, seat.tracker)

    def drop(self, seat: Seat) -> None:
        """Free the sequence of a request that is over."""
        if seat.place != _ENGINE_S:
            with seat.tracker.lent():
                llama_cpp.llama_memory_seq_rm(seat.tracker.handles[-1], seat.place, -1, -1)
            self._owners.pop(seat.place, None)
            seat.place = _ENGINE_S
        if self.base is seat:
            self.base = None

    def has_room(self) -> bool:
        """Return whether one more request may lie aside."""
        return any(self._is_free(sequence) for sequence in self._sequences)

    def batch(self, items: Sequence[tuple[int, int, int]]) -> Any:
        """Return a ``llama_batch`` of tokens, each with its position and its sequence."""
        if self._batch is None:
            self._batch = _internals.LlamaBatch(
                n_tokens=len(self._sequences) + 1, embd=0, n_seq_max=1, verbose=False
            )
        batch = self._batch.batch
        batch.n_tokens = len(items)
        for i, (token, position, sequence) in enumerate(items):
            batch.token[i], batch.pos[i] = token, position
            batch.seq_id[i][0], batch.n_seq_id[i] = sequence, 1
            batch.logits[i] = True
        return batch

    def _is_free(self, sequence: int) -> bool:
        owner = self._owners.get(sequence)
        return owner is None or owner() is None

    def _free_sequence(self, seat: Seat) -> int:
        """Return an empty sequence, which is the seat's from now on."""
        sequence = next(filter(self._is_free, self._sequences))
        self._owners[sequence] = weakref.ref(seat)
        with seat.tracker.lent():  # of a request that was lost
            llama_cpp.llama_memory_seq_rm(seat.tracker.handles[-1], sequence, -1, -1)
        return sequence


class Seat:
    """Seat of one request (implements ``llmaas_hooks.Seat``).

    Attributes:
        engine, tracker: Engine and tracker of the request's context.
        place: Sequence that holds the request's cells.
        records: State of the request, while its cells are in another sequence.
        next_token: Token that the request evaluates next; None in a prompt.
        waited_s: Seconds for which the app has waited between the last two tokens.
        step_s: Seconds of the batch that evaluated the last token, 0 if none did; None if the
            request did not lie aside in this turn.
    """

    def __init__(self, host: Host, end: Seated, tracker: CellTracker) -> None:
        """Prepare to put a request aside."""
        self._host, self._end = host, end
        self.engine, self.tracker = end.engine, tracker
        self.place = _ENGINE_S
        self.records: SeatRecords | None = None
        self.next_token: int | None = None
        self._level = 0
        self._output: tuple[int, int] | None = None  # number of the batch, and row of its outputs
        self.waited_s = 0.0
        self.step_s: float | None = None
        self._n_tokens = 0
        self._is_ahead = False  # the cells have the next token, but not Llama's records
        self._is_told = self._is_aside = self._is_over = False

    @property
    def _seats(self) -> Seats:
        assert self.tracker.seats is not None
        return self.tracker.seats

    @property
    def is_aside(self) -> bool:
        """Whether the request has left the engine."""
        return self._is_aside

    @property
    def level(self) -> int:
        """Index of the level at which the next token is computed."""
        return self._level if self._is_aside else self._host.level(self.engine.ctx)

    @property
    def row(self) -> int | None:
        """Row of the engine's outputs that belongs to the request; None if it has none any more."""
        if self._output is None or self._output[0] != self._seats.n_batches:
            return None
        return self._output[1]

    @property
    def is_elsewhere(self) -> bool:
        """Whether the request sits on the engine, and sequence 0 holds the cells of another one."""
        return self._seats.seated is self and self.place != _ENGINE_S

    @property
    def can_leave(self) -> bool:
        """Whether the request is in progress, and has room to lie aside."""
        is_alone = self.engine.is_alive and self.engine.alteration is None
        has_place = self.place != _ENGINE_S or self._seats.has_room()
        return is_alone and has_place and not (self._is_over or self._has_proposals)

    def leave(self) -> None:
        """Put the request aside, in whose place others may then use the engine."""
        seats, llama = self._seats, self.engine.llama
        self._drop_ahead()
        if self._end.drafting is not None:
            self._end.drafting.detach()  # until the request has the engine to itself
        self._n_tokens, self._output, self.step_s = int(llama.n_tokens), None, 0.0
        self._level = self._host.level(self.engine.ctx)
        self.engine.require_evaluation()  # others may replace the logits
        if not self._is_told:  # before other tokens are evaluated
            self._is_told = True
            self._tell(begins=True)
        self.tracker.put_aside(self._end)
        seats.seated = None
        if self.place == _ENGINE_S:
            seats.base = self
        else:
            seats.swap_out(self)
        self._is_aside = True

    def enter(self, waited_s: float = 0.0) -> None:
        """Bring the request back, whose cells move into sequence 0 only once it evaluates some.

        Raises:
            ReferenceError: The engine was closed meanwhile.
        """
        if not self.engine.is_alive:
            raise ReferenceError("the Llama object was closed while another request used it")
        self.waited_s += waited_s
        seats = self._seats
        if seats.seated is not None:  # it was interrupted; this may move the request of sequence 0
            seats.seated.settle()
        if self.place != _ENGINE_S:
            self.engine.end()  # saves the request that was interrupted
            seats.swap_in(self)
        seats.seated, self._is_aside = self, False
        self.tracker.bring_back(self._end)
        self._host.hooks.request_switch(self._end.request)

    def settle(self) -> None:
        """Let the request that sits on the engine take sequence 0, to use the engine alone."""
        seats = self._seats
        seats.seated, self._output = None, None
        self._drop_ahead()
        if self.place != _ENGINE_S:
            seats.swap_out(self)
        self._sit_alone()
        self.engine.require_evaluation()  # the last logits may be of others' tokens

    def close(self) -> None:
        """Give up the seat: the request is over."""
        self._is_over = True
        seats = self.tracker.seats
        if seats is None or not self.engine.is_alive or self.engine.llama.ctx is None:
            return  # the context was freed, maybe after the end of the suite
        if seats.seated is self:
            self.settle()
        seats.drop(self)
        self.tracker.forget_aside(self._end)

    def has_evaluated(self, position: int) -> bool:
        """Return whether the token at a position was evaluated with others, and is the next one.

        After another batch it counts as not evaluated, because its logits are gone.
        """
        return self._is_ahead and self.row is not None and position == self._n_tokens

    def evaluates(self, batch: Any) -> bool:
        """Return whether a batch of ``Llama``'s is the token that was evaluated with others."""
        is_it = (
            batch.n_tokens == 1
            and batch.token[0] == self.next_token
            and self.has_evaluated(batch.pos[0])
        )
        self._is_ahead = self._is_ahead and not is_it
        return is_it

    def evaluate_with(self, others: Sequence[AnySeat]) -> float | None:
        """Evaluate the next token of this request and of others, all aside, in one batch.

        Returns:
            Seconds that it took; None if it failed.

        Raises:
            ValueError: The levels differ.
        """
        seats = [self, *cast("Sequence[Seat]", others)]
        if len(levels := {seat.level for seat in seats}) > 1:
            raise ValueError(f"a batch has one level, found requests of the levels {levels}")
        if any(seat._n_tokens >= self.tracker.app_n_ctx for seat in seats):
            return None  # the one whose context is full is told so when it evaluates its token
        self.engine.settle()
        for seat in seats:
            seat._drop_ahead()
            seat._output = None
        items = [(cast("int", one.next_token), one._n_tokens, one.place) for one in seats]
        batch, ctx = self._seats.batch(items), self.engine.ctx
        self._host.hooks.request_switch(self._end.request)
        started = time.perf_counter()
        self._seats.n_batches += 1
        with self._host.call(self.tracker):
            status = self._host.decode_together(ctx, batch)
        if status != 0:
            return None
        step_s = time.perf_counter() - started
        for row, seat in enumerate(seats):
            seat._output, seat.step_s = (self._seats.n_batches, row), step_s
            seat._is_ahead = True
        self._host.hooks.decode(DecodeStep(ctx, len(seats), step_s))
        return step_s

    # -- inside ---------------------------------------------------------------------------------

    @property
    def _has_proposals(self) -> bool:
        """Whether the last batch has tokens that a draft model proposed and nobody sampled yet."""
        if self.engine.llama.draft_model is None or self.next_token is None:  # it is in its prompt
            return False
        return bool(self.engine.n_said != self.engine.llama.n_tokens)

    def _drop_ahead(self) -> None:
        """Drop the cell of a token that was evaluated with others, but not by the request."""
        if self._is_ahead:
            self._is_ahead = False
            with self.tracker.lent():
                memory = self.tracker.handles[-1]
                llama_cpp.llama_memory_seq_rm(memory, self.place, self._n_tokens, -1)

    def _sit_alone(self) -> None:
        seats = self._seats
        if self.place != _ENGINE_S:
            seats.take_engine_s(self)
        seats.base = None
        if self._is_told:
            self._is_told = False
            self._tell(begins=False)
            if self._end.drafting is not None:
                self._end.drafting.attach()

    def _tell(self, *, begins: bool) -> None:
        n_tokens = len(self.engine.resident_tokens())
        self._host.hooks.together(self._end.request, n_tokens, begins)


def _relabel(tracker: CellTracker, source: int, target: int) -> None:
    """Give all cells of a sequence to another one, which is empty."""
    memory = tracker.handles[-1]
    with tracker.lent():
        llama_cpp.llama_memory_seq_cp(memory, source, target, -1, -1)
        llama_cpp.llama_memory_seq_rm(memory, source, -1, -1)

"""Hide plugins' sequences from an app's calls on the same context.

Such a context has more sequences than the app asked for, and may have more cells. To the app's
calls, sequence 0 looks like the only one. Before a call that would show or move all cells, plugins'
sequences are removed, so plugins must be able to lose the cells that they keep there.
"""

from __future__ import annotations

from typing import Any

from llama_cpp import llama_cpp

from llmaas_patches.cell_tracker import CellTracker, address
from llmaas_patches.wrappers.cells import Around, Function

__all__ = ["around_clear", "around_keep", "around_load", "around_named", "around_remove"]

_APP = 0
_ALL = -1


def around_clear(tracker: CellTracker, original: Function, args: tuple[Any, ...]) -> Any:
    """Handle ``llama_memory_clear``: empty the app's sequence.

    Clearing all cells would also touch the memory of the cells that plugins added.
    """
    if not (tracker.parked.others() or tracker.n_spare):
        return original(*args)
    sequence = _APP if tracker.seats is None else tracker.seats.sequence
    with tracker.lent():
        llama_cpp.llama_memory_seq_rm(args[0], sequence, -1, -1)
    return None


def around_remove(tracker: CellTracker, original: Function, args: tuple[Any, ...]) -> Any:
    """Handle ``llama_memory_seq_rm``: "all sequences" means the app's sequence.

    That is another one while the request's cells are there (``llmaas_patches.seats``).
    """
    memory, sequence, *positions = args
    seats = tracker.seats
    if seats is not None and address(sequence) in {_ALL, _APP}:
        if seats.keeps(*positions):
            return True
        return original(memory, seats.sequence, *positions)
    if tracker.parked and address(sequence) == _ALL:
        return original(memory, _APP, *positions)
    _look(tracker, original, sequence)
    return original(*args)


def around_keep(tracker: CellTracker, original: Function, args: tuple[Any, ...]) -> Any:
    """Handle ``llama_memory_seq_keep``: do nothing, as the app has no other sequence to lose."""
    if (tracker.parked or tracker.seats is not None) and address(args[1]) == _APP:
        return None
    _look(tracker, original, args[1])
    return original(*args)


def around_named(*places: int) -> Around:
    """Return a handler for a call whose arguments at ``places`` are sequences."""

    def around(tracker: CellTracker, original: Function, args: tuple[Any, ...]) -> Any:
        for place in places:
            _look(tracker, original, args[place])
        return original(*args)

    return around


def around_load(place: int) -> Around:
    """Return a handler for a call that fills the sequence which its argument at ``place`` names."""
    named = around_named(place)

    def around(tracker: CellTracker, original: Function, args: tuple[Any, ...]) -> Any:
        tracker.give_up_own()
        tracker.give_up_seats()
        return named(tracker, original, args)

    return around


def _look(tracker: CellTracker, original: Function, sequence: Any) -> None:
    if address(sequence) >= tracker.app_n_seq_max:
        tracker.claimed(original.__name__)

"""Calls of an app on a context in which plugins keep sequences of their own.

Such a context has more sequences than the app asked for, and more cells. The app's calls see
sequence 0 as if there were no other. A call that would show or move all cells, and cannot be told
to leave some out, finds the others gone: plugins must be able to do without what they keep there.
"""

from __future__ import annotations

from typing import Any

from llama_cpp import llama_cpp

from llmaas_patches.ledger import Around, Function, Ledger, address

__all__ = ["around_clear", "around_keep", "around_named", "around_remove"]

_APP = 0
_ALL = -1


def around_clear(ledger: Ledger, original: Function, args: tuple[Any, ...]) -> Any:
    """``llama_memory_clear``: empty the app's sequence.

    Clearing the cells, too, would touch the memory of those that plugins added.
    """
    if not (ledger.parked or ledger.n_spare):
        return original(*args)
    with ledger.lent():
        llama_cpp.llama_memory_seq_rm(args[0], _APP, -1, -1)
    return None


def around_remove(ledger: Ledger, original: Function, args: tuple[Any, ...]) -> Any:
    """``llama_memory_seq_rm``: of any sequence means of the app's."""
    memory, sequence, *positions = args
    if ledger.parked and address(sequence) == _ALL:
        return original(memory, _APP, *positions)
    _look(ledger, original, sequence)
    return original(*args)


def around_keep(ledger: Ledger, original: Function, args: tuple[Any, ...]) -> Any:
    """``llama_memory_seq_keep``: the app has no other sequence to lose."""
    if ledger.parked and address(args[1]) == _APP:
        return None
    _look(ledger, original, args[1])
    return original(*args)


def around_named(*places: int) -> Around:
    """A call whose arguments at ``places`` are sequences."""

    def around(ledger: Ledger, original: Function, args: tuple[Any, ...]) -> Any:
        for place in places:
            _look(ledger, original, args[place])
        return original(*args)

    return around


def _look(ledger: Ledger, original: Function, sequence: Any) -> None:
    if address(sequence) >= ledger.app_n_seq_max:
        ledger.claimed(original.__name__)

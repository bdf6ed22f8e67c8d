"""Whether the cells of a context are what ``Llama`` takes them for.

An app may evaluate batches of its own on a ``Llama``'s context, or shift its cells, and ``Llama``
is not told. Whatever it goes on with is the app's affair, as ever; but cells that hold something
else must not be stored under the names of the tokens that ``Llama`` believes in.
"""

from __future__ import annotations

from typing import Any

__all__ = ["Ownership"]


class Ownership:
    """By engine handle (a context's and its memory's address): who wrote the cells."""

    def __init__(self) -> None:
        """Start with no engine."""
        self._batches: dict[int, Any] = {}
        self._disturbed: set[int] = set()

    def adopt(self, handles: tuple[int, ...], batch: Any) -> None:
        """Take what ``Llama`` evaluates through ``batch`` for its own, from now on."""
        self._batches[handles[0]] = batch
        self.reclaim(handles)

    def decoded(self, ctx: int, batch: Any) -> None:
        """A batch was evaluated."""
        if batch is not self._batches.get(ctx, batch):
            self._disturbed.add(ctx)

    def edited(self, handle: int) -> None:
        """Cells are not, or not where, an evaluation left them."""
        self._disturbed.add(handle)

    def is_sound(self, handles: tuple[int, ...]) -> bool:
        """Whether nobody but ``Llama`` wrote the cells."""
        return self._disturbed.isdisjoint(handles)

    def reclaim(self, handles: tuple[int, ...]) -> None:
        """``Llama`` starts from nothing, and drops all cells before it evaluates."""
        self._disturbed.difference_update(handles)

    def forget(self, ctx: int) -> None:
        """The context is gone; its address may come again."""
        self._batches.pop(ctx, None)
        self._disturbed.discard(ctx)

"""Sequences of an engine in which a plugin keeps cells between calls."""

from __future__ import annotations

__all__ = ["ParkedSequences"]


class ParkedSequences(set[int]):
    """Numbers of these sequences.

    One of them may label the first cells of sequence 0, and no others. If the context in sequence 0
    is left, only its other cells must be labeled. The label adds no cells. Before the host changes
    sequence 0 from a position on, it removes the label from the cells there.

    Attributes:
        current: The sequence whose cells are sequence 0's, too; None if there is none. The plugin
            sets it. It counts only while it is one of these sequences.
        n_current: Number of its cells at most.
    """

    current: int | None = None
    n_current: int = 0

    def others(self) -> set[int]:
        """Return the sequences that have cells of their own."""
        return self - {self.current}

    def clear(self) -> None:
        """Forget all sequences, whose cells are gone."""
        super().clear()
        self.current, self.n_current = None, 0

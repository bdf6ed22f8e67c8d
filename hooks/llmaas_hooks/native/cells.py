"""Memory of a context's KV cells."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["CellMemory"]


class CellMemory(Protocol):
    """Memory of a context's KV cells; llama.cpp reserves all of it when it creates the context."""

    @property
    def n(self) -> int:
        """Number of cells; 0 if their place is unknown, because several buffers hold them."""

    @property
    def n_bytes(self) -> int:
        """Number of bytes of all cells."""

    @property
    def touched_bytes(self) -> int:
        """Number of bytes that may occupy memory now: all of them until the first release.

        After a release, bytes count up to the last cell that a graph reached. A restored cell
        therefore counts from the next graph on.
        """

    def release(self) -> bool:
        """Give the memory of all cells back to the system; a cell written to takes memory again.

        No sequence may use any cell: all cells hold zeros afterwards.

        Returns:
            Whether the memory was given back; if not, nothing was changed.
        """

    def land(
        self, blob: NDArray[np.uint8], sequence: int, n_landings: int
    ) -> NDArray[np.uint64] | None:
        """Label cells as those of a sequence blob, and return where the blob's rows belong.

        The method copies no rows: the caller writes them to the returned places before the next
        evaluation.

        Args:
            blob: Bytes as ``llama_state_seq_set_data`` takes them; only the headers are read.
            sequence: Sequence that gets the cells.
            n_landings: Number of K and V tensors in the blob: two for each layer.

        Returns:
            Places of each K and V in the blob's order, shape ``(n_landings, 4)``, with rows
            ``(address, step, n_bytes, n_pieces)``. A tensor's bytes belong in ``n_pieces`` places
            of ``n_bytes`` each; the first is at ``address`` and the others follow ``step`` bytes
            apart. None if the engine refused or the cells are too scattered; some cells may be
            labeled then, so remove the sequence.
        """

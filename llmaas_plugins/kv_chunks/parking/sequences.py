"""Numbers of the sequences that the plugin uses in an engine, and of those of requests aside."""

from __future__ import annotations

from typing import Any

from llama_cpp import llama_cpp

__all__ = ["PARKED_SEQUENCES", "SCRATCH_SEQUENCE", "SEQUENCES", "lie_aside"]

SCRATCH_SEQUENCE = 1
"""Sequence through which ranges of cells are read and written; empty between calls."""
SEQUENCES = 2
"""Number of sequences without parking: the app's sequence 0 and the scratch sequence."""
PARKED_SEQUENCES = range(SEQUENCES, 8)
"""Sequences of parked contexts, if the context has cells for them."""


def lie_aside(memory: Any, n_seq_max: int) -> bool:
    """Return whether requests lie aside in a context with parked ones and so many sequences."""
    return any(
        llama_cpp.llama_memory_seq_pos_max(memory, sequence) >= 0
        for sequence in range(PARKED_SEQUENCES.stop, n_seq_max)
    )

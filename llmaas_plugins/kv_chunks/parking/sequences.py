"""Numbers of the sequences that the plugin uses in an engine."""

from __future__ import annotations

__all__ = ["PARKED_SEQUENCES", "SCRATCH_SEQUENCE", "SEQUENCES"]

SCRATCH_SEQUENCE = 1
"""Sequence through which ranges of cells are read and written; empty between calls."""
SEQUENCES = 2
"""Number of sequences without parking: the app's sequence 0 and the scratch sequence."""
PARKED_SEQUENCES = range(SEQUENCES, 8)
"""Sequences of parked contexts, if the context has cells for them."""

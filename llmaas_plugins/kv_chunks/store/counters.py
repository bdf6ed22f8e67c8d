"""Counters of a store."""

from __future__ import annotations

from dataclasses import dataclass, fields

__all__ = ["StoreCounters"]


@dataclass(slots=True)
class StoreCounters:
    """Events since the store was opened."""

    claimed_chunks: int = 0
    claimed_bytes: int = 0
    ram_hits: int = 0
    disk_hits: int = 0
    faults: int = 0
    ram_reclaimed: int = 0
    refilled_chunks: int = 0
    disk_evicted: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    no_room: int = 0
    over_write_budget: int = 0
    cut_chunks: int = 0
    cut_bytes: int = 0
    io_errors: int = 0

    def snapshot(self) -> dict[str, int]:
        """Return the counters by name."""
        return {item.name: getattr(self, item.name) for item in fields(self)}

"""Forgetting for good: segments are written again without some records, the old ones erased.

Every step leaves an archive that opens: until the new segment is whole and has its name, the old
one counts; from then on the old one is a leftover, which the next writer erases if this one cannot.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from pathlib import Path

from llmaas_plugins.knn_lm.archive_files import SegmentName, erase, retire, write_whole
from llmaas_plugins.knn_lm.segments import Segment

__all__ = ["forget_records"]


def forget_records(
    directory: Path,
    segments: Sequence[tuple[SegmentName, Segment]],
    ids: Collection[bytes],
    n_given: int,
) -> None:
    """Take records out of segments. The segments must be opened again afterwards.

    Args:
        directory: Where they are.
        segments: All of the archive's, in order.
        ids: Which conversations.
        n_given: How many were given numbers by now. The last segment stays, be it empty, to keep
            that in mind; unless nothing is left that a number could be mistaken for.
    """
    is_any_left = any(r.header.id not in ids for _, segment in segments for r in segment.records)
    for name, segment in segments:
        kept = [record for record in segment.records if record.header.id not in ids]
        is_last = segment is segments[-1][1]
        if is_any_left and len(kept) == len(segment.records):
            continue
        if kept or (is_last and is_any_left):
            header = segment.binding.pack(n_given)
            rewritten = directory / str(SegmentName(name.number, name.generation + 1))
            write_whole(rewritten, itertools.chain([header], map(segment.raw, kept)))
            erase(segment.path)
        else:
            retire(segment.path)

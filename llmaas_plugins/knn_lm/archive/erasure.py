"""Erasure of conversations: segments are rewritten without them, then the old files are erased.

Every step leaves an archive that can be opened. The old segment counts until the new one is
complete and has its name. From then on the old one is a leftover, which the next writer erases if
this one cannot.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from pathlib import Path

from llmaas_plugins.knn_lm.archive.files import SegmentName, erase, retire, write_atomic
from llmaas_plugins.knn_lm.archive.segments import ArchiveSegment

__all__ = ["erase_records"]


def erase_records(
    directory: Path,
    segments: Sequence[tuple[SegmentName, ArchiveSegment]],
    ids: Collection[bytes],
    n_given: int,
) -> None:
    """Remove records from segments; the caller must reopen the segments afterwards.

    Args:
        directory: Directory of the segments.
        segments: All segments of the archive, in order.
        ids: Ids of the conversations to remove.
        n_given: Conversation numbers given out so far. The last segment is kept to record it, even
            if that segment is empty, unless no conversation is left in the archive.
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
            write_atomic(rewritten, itertools.chain([header], map(segment.raw, kept)))
            erase(segment.path)
        else:
            retire(segment.path)

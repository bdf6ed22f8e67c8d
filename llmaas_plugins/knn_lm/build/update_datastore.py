"""Updates of the selected datastore as the archive grows, one buffer of pairs at a time.

Between refreshes, and across restarts, a file of pair numbers keeps the selection's state. Pair
numbers are valid only while the archive's conversations are the same, so the file has a digest of
their ids. If a conversation was forgotten, selection starts over.
"""

from __future__ import annotations

import hashlib
import io
import math
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from llmaas_plugins.knn_lm.archive.archive import Archive
from llmaas_plugins.knn_lm.archive.files import ONLINE, write_whole
from llmaas_plugins.knn_lm.build.build_datastore import (
    Plan,
    Selected,
    first_objective,
    source_of,
    write,
)
from llmaas_plugins.knn_lm.selection.algorithms import BUFFER
from llmaas_plugins.knn_lm.selection.objective import Objective
from llmaas_plugins.knn_lm.selection.priority_sampling import Kept, Stream

__all__ = ["is_due", "refresh"]

_LEAST_NEW = 1000
_GROWTH = 0.1
_DIGEST_BYTES = 16
_MOST_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class _State:
    """State of a selection after a refresh.

    Attributes:
        n_seen: Pairs of the archive that selection has seen.
        n_conversations: Conversations that these pairs come from.
        digest: Digest of these conversations' ids, in order.
        theta: Theta of the objective.
        size: Most pairs to keep.
        kept: Pairs that were kept.
    """

    n_seen: int
    n_conversations: int
    digest: bytes
    theta: float
    size: int
    kept: Kept


def is_due(archive: Archive, plan: Plan) -> bool:
    """Return whether enough pairs are new that selecting again is worth its time."""
    state = _read(archive, plan)
    n_seen = 0 if state is None else state.n_seen
    n_new = archive.n_pairs - n_seen
    return n_new >= min(BUFFER, max(_LEAST_NEW, int(_GROWTH * n_seen))) or (
        n_new > 0 and n_seen == 0
    )


def refresh(
    archive: Archive, plan: Plan, progress: Callable[[int], None] = lambda _n: None
) -> Selected:
    """Select among the new pairs, fit the mixture, and write the datastore.

    An exception from ``progress`` ends the refresh between two buffers. The next refresh then
    starts where the last complete one ended.

    Raises:
        StoreError: The archive is empty, or a file cannot be written.
    """
    source = source_of(archive, plan)
    state = _read(archive, plan)
    theta = first_objective(source, plan.seed).theta if state is None else state.theta
    objective = Objective(theta)
    stream = Stream(source, plan.size, objective, seed=plan.seed)
    if state is not None:
        stream.resume(state.kept, state.n_seen)
    for n in stream.advance(len(source.values), is_end=True):
        progress(n)
    selected = write(archive, source, stream.kept.selection(), objective, plan)
    ids = archive.ids()
    digest = _digest(ids)
    new = _State(stream.n_seen, len(ids), digest, theta, plan.size, stream.kept)
    write_whole(archive.directory / ONLINE, [_encoded(new)])
    return selected


def _read(archive: Archive, plan: Plan) -> _State | None:
    """Return the stored state, or None if it is missing, damaged, or of another archive or size."""
    path = archive.directory / ONLINE
    try:
        if not path.is_file() or path.is_symlink() or path.stat().st_size > _MOST_BYTES:
            return None
        state = _decoded(path)
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error):
        return None
    known = archive.ids()[: state.n_conversations]
    is_same = len(known) == state.n_conversations and _digest(known) == state.digest
    is_possible = state.n_seen <= archive.n_pairs and state.size == plan.size
    return state if is_same and is_possible else None


def _digest(ids: list[bytes]) -> bytes:
    return hashlib.blake2b(b"".join(ids), digest_size=_DIGEST_BYTES).digest()


def _encoded(state: _State) -> bytes:
    file = io.BytesIO()
    np.savez(
        file,
        allow_pickle=False,
        numbers=np.array([state.n_seen, state.n_conversations, state.size], np.int64),
        constants=np.array([state.theta, state.kept.threshold]),
        digest=np.frombuffer(state.digest, np.uint8),
        indices=state.kept.indices,
        losses=state.kept.losses,
        priorities=state.kept.priorities,
    )
    return file.getvalue()


def _decoded(path: Path) -> _State:
    """Read a state.

    Raises:
        ValueError: The file is not a state. Other errors of ``numpy.load`` are passed on.
    """
    with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as file:
        n_seen, n_conversations, size = (int(number) for number in file["numbers"])
        theta, threshold = (float(number) for number in file["constants"])
        columns = (file["indices"], file["losses"], file["priorities"])
        digest = file["digest"].tobytes()
    numbers = (n_seen, n_conversations, size)
    if not (0 < theta < math.inf and 0 <= threshold < math.inf and min(numbers) >= 0):
        raise ValueError("not a selection's state")
    kept = Kept(*columns, threshold)
    _check(kept, n_seen)
    return _State(*numbers[:2], digest, theta, size, kept)


def _check(kept: Kept, n_seen: int) -> None:
    indices, losses, priorities = kept.indices, kept.losses, kept.priorities
    is_sound = indices.dtype == np.int64 and losses.dtype == priorities.dtype == np.float64
    if not (is_sound and indices.ndim == 1 and indices.shape == losses.shape == priorities.shape):
        raise ValueError("not a selection: wrong types or shapes")
    is_within = not len(indices) or (indices.min() >= 0 and indices.max() < n_seen)
    if not (is_within and (losses > 0).all() and np.isfinite(priorities).all()):
        raise ValueError("not a selection: values out of range")

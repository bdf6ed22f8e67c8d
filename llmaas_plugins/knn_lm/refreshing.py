"""The selected datastore follows the archive as it grows: Algorithm 2, a buffer at a time.

Between two refreshes, also over restarts, the candidate subsets wait in a file of pair numbers.
These mean something only as long as the archive's conversations are the same, so it names those,
too; when one was forgotten, selection starts anew.
"""

from __future__ import annotations

import hashlib
import io
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from llmaas_plugins.knn_lm.archive import Archive
from llmaas_plugins.knn_lm.archive_files import ONLINE, write_whole
from llmaas_plugins.knn_lm.objective import Objective
from llmaas_plugins.knn_lm.selecting import (
    ArchiveSource,
    Plan,
    Selected,
    first_objective,
    source_of,
    write,
)
from llmaas_plugins.knn_lm.selection import BUFFER, SHARES, Online, Selection

__all__ = ["is_due", "refresh"]

_LEAST_NEW = 1000
_GROWTH = 0.1
_DIGEST_BYTES = 16
_MOST_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class _State:
    """Where selection was.

    Attributes:
        n_seen: Pairs of the archive that have been offered to it.
        n_conversations: Conversations that they are of.
        digest: Of these conversations' ids, in order.
        theta: Of the objective.
        size: Most pairs to keep.
        selections: The candidate subsets.
    """

    n_seen: int
    n_conversations: int
    digest: bytes
    theta: float
    size: int
    selections: dict[float, Selection]


def is_due(archive: Archive, plan: Plan) -> bool:
    """Whether so much is new that selecting again is worth its time."""
    state = _read(archive, plan)
    n_seen = 0 if state is None else state.n_seen
    n_new = archive.n_pairs - n_seen
    return n_new >= min(BUFFER, max(_LEAST_NEW, int(_GROWTH * n_seen))) or (
        n_new > 0 and n_seen == 0
    )


def refresh(
    archive: Archive, plan: Plan, progress: Callable[[int], None] = lambda _n: None
) -> Selected:
    """Take in what is new, fit, and write the datastore.

    What ``progress`` raises ends it between two buffers; the next time it starts where the last
    refresh ended.

    Raises:
        StoreError: The archive is empty, or a file cannot be written.
    """
    source = source_of(archive, plan)
    state = _read(archive, plan)
    theta = first_objective(source, plan.seed).theta if state is None else state.theta
    objective = Objective(theta)
    selection, online = _advanced(source, objective, plan, state, progress)
    selected = write(archive, source, selection, objective, plan)
    ids = archive.ids()
    new = _State(online.n_seen, len(ids), _digest(ids), theta, plan.size, online.selections)
    write_whole(archive.directory / ONLINE, [_encoded(new)])
    return selected


def _advanced(
    source: ArchiveSource,
    objective: Objective,
    plan: Plan,
    state: _State | None,
    progress: Callable[[int], None],
) -> tuple[Selection, Online]:
    online = Online(source, plan.size, objective, seed=plan.seed)
    if state is not None:
        online.resume(state.selections, state.n_seen)
    for n in online.advance(len(source.values), is_end=True):
        progress(n)
    return online.best(), online


def _read(archive: Archive, plan: Plan) -> _State | None:
    """The state, if it is there, sound, and about this archive."""
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
    arrays = {
        "numbers": np.array([state.n_seen, state.n_conversations, state.size], np.int64),
        "theta": np.array(state.theta),
        "digest": np.frombuffer(state.digest, np.uint8),
    }
    for share, selection in state.selections.items():
        arrays[f"indices {share}"] = selection.indices
        arrays[f"weights {share}"] = selection.weights
    file = io.BytesIO()
    np.savez(file, allow_pickle=False, **arrays)
    return file.getvalue()


def _decoded(path: Path) -> _State:
    """Read a state.

    Raises:
        ValueError: It is none; and what zipfile raises.
    """
    with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as file:
        n_seen, n_conversations, size = (int(number) for number in file["numbers"])
        theta = float(file["theta"])
        selections = {
            share: _selection(file[f"indices {share}"], file[f"weights {share}"], n_seen)
            for share in SHARES
            if f"indices {share}" in file
        }
        digest = file["digest"].tobytes()
    if not (selections and np.isfinite(theta) and theta > 0 and min(n_seen, size) >= 0):
        raise ValueError("no state")
    return _State(n_seen, n_conversations, digest, theta, size, selections)


def _selection(indices: np.ndarray, weights: np.ndarray, n_seen: int) -> Selection:
    is_sound = indices.dtype == np.int64 and weights.dtype == np.float32
    if not is_sound or indices.ndim != 1 or indices.shape != weights.shape:
        raise ValueError("no selection")
    if len(indices) and not (indices.min() >= 0 and indices.max() < n_seen and weights.min() > 0):
        raise ValueError("no selection")
    return Selection(indices, weights)

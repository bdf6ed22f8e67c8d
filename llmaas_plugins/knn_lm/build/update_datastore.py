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
from llmaas_plugins.knn_lm.archive.files import ONLINE, write_atomic
from llmaas_plugins.knn_lm.build.archive_source import (
    SAMPLE,
    SelectionParams,
    archive_source,
    initial_objective,
)
from llmaas_plugins.knn_lm.build.build_datastore import BuildResult, fit_and_write
from llmaas_plugins.knn_lm.selection.algorithms import BUFFER
from llmaas_plugins.knn_lm.selection.objective import Objective
from llmaas_plugins.knn_lm.selection.priority_sampling import PrioritySample, PrioritySampler

__all__ = ["is_update_due", "update_bytes", "update_datastore"]

_LEAST_NEW = 1000
_GROWTH = 0.1
_FIXED_BYTES = 16 << 20
"""Bytes for modules, and for searches in parts of a fixed size."""
_KEPT_BYTES, _SAMPLED_BYTES = 4, 10
"""Bytes for each number of a key: it is kept in half precision, and copied; a sample is also held
twice in single precision."""
_PROJECTED_BYTES = 16
"""Bytes for each number of a projected key, three times in single precision with room to grow."""
_PAIR_BYTES = 40
"""Bytes for each pair of the archive, in its table and in copies of the columns."""
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
        how: Whether pairs are drawn.
        kept: Pairs that were kept.
    """

    n_seen: int
    n_conversations: int
    digest: bytes
    theta: float
    size: int
    how: str
    kept: PrioritySample


def is_update_due(archive: Archive, params: SelectionParams) -> bool:
    """Return whether enough pairs are new that selecting again is worth its time."""
    state = _read(archive, params)
    n_seen = 0 if state is None else state.n_seen
    n_new = archive.n_pairs - n_seen
    return n_new >= min(BUFFER, max(_LEAST_NEW, int(_GROWTH * n_seen))) or (
        n_new > 0 and n_seen == 0
    )


def update_bytes(archive: Archive, params: SelectionParams) -> int:
    """Return the memory that ``update_datastore`` takes at most, in bytes."""
    n_embd = 0 if archive.binding is None else archive.binding.n_embd
    n_kept, n_sampled = (min(archive.n_pairs, n) for n in (params.size, SAMPLE))
    kept = n_kept * max(_KEPT_BYTES * n_embd, _PROJECTED_BYTES * params.n_dims)
    return _FIXED_BYTES + _PAIR_BYTES * archive.n_pairs + kept + _SAMPLED_BYTES * n_embd * n_sampled


def update_datastore(
    archive: Archive, params: SelectionParams, progress: Callable[[int], None] = lambda _n: None
) -> BuildResult:
    """Select among the new pairs, fit the mixture, and write the datastore.

    ``progress`` is called with the number of new pairs after each buffer, and with 0 between the
    parts of the fit. An exception that it raises ends the refresh; the next one then starts where
    the last complete one ended.

    Raises:
        StoreError: The archive is empty, or a file cannot be written.
    """
    source = archive_source(archive, params)
    state = _read(archive, params)
    theta = initial_objective(source, params.seed).theta if state is None else state.theta
    objective = Objective(theta)
    sampler = PrioritySampler(source, params.size, objective, how=params.how, seed=params.seed)
    if state is not None:
        sampler.resume(state.kept, state.n_seen)
    for n in sampler.advance(len(source.values), is_end=True):
        progress(n)
    selection = sampler.kept.selection()
    selected = fit_and_write(
        archive, source, selection, objective, params, between=lambda: progress(0)
    )
    ids = archive.ids()
    digest = _digest(ids)
    new = _State(sampler.n_seen, len(ids), digest, theta, params.size, params.how, sampler.kept)
    write_atomic(archive.directory / ONLINE, [_encoded(new)])
    return selected


def _read(archive: Archive, params: SelectionParams) -> _State | None:
    """Return the stored state; None if missing, damaged, or of another archive or parameters."""
    path = archive.directory / ONLINE
    try:
        if not path.is_file() or path.is_symlink() or path.stat().st_size > _MOST_BYTES:
            return None
        state = _decoded(path)
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error):
        return None
    known = archive.ids()[: state.n_conversations]
    is_same = len(known) == state.n_conversations and _digest(known) == state.digest
    is_wanted = (state.size, state.how) == (params.size, params.how)
    return state if is_same and is_wanted and state.n_seen <= archive.n_pairs else None


def _digest(ids: list[bytes]) -> bytes:
    return hashlib.blake2b(b"".join(ids), digest_size=_DIGEST_BYTES).digest()


def _encoded(state: _State) -> bytes:
    file = io.BytesIO()
    np.savez(
        file,
        allow_pickle=False,
        numbers=np.array([state.n_seen, state.n_conversations, state.size], np.int64),
        constants=np.array([state.theta, state.kept.threshold]),
        how=np.array(state.how),
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
        how = str(file["how"]) if "how" in file else "draw"  # as earlier releases did
    numbers = (n_seen, n_conversations, size)
    if not (0 < theta < math.inf and 0 <= threshold < math.inf and min(numbers) >= 0):
        raise ValueError("not a selection's state")
    kept = PrioritySample(*columns, threshold)
    _check(kept, n_seen)
    return _State(*numbers[:2], digest, theta, size, how, kept)


def _check(kept: PrioritySample, n_seen: int) -> None:
    indices, losses, priorities = kept.indices, kept.losses, kept.priorities
    is_sound = indices.dtype == np.int64 and losses.dtype == priorities.dtype == np.float64
    if not (is_sound and indices.ndim == 1 and indices.shape == losses.shape == priorities.shape):
        raise ValueError("not a selection: wrong types or shapes")
    is_within = not len(indices) or (indices.min() >= 0 and indices.max() < n_seen)
    if not (is_within and (losses > 0).all() and np.isfinite(priorities).all()):
        raise ValueError("not a selection: values out of range")

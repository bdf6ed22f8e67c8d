"""Held-out targets: for a sample of the archive, the selected pairs of other conversations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from llmaas_plugins.knn_lm.archive.archive import Archive
from llmaas_plugins.knn_lm.archive.conversation_info import ConversationInfo
from llmaas_plugins.knn_lm.build.archive_source import ArchiveSource, SelectionParams
from llmaas_plugins.knn_lm.datastore.distances import squared_distances
from llmaas_plugins.knn_lm.mixing.grid_search import HeldOut
from llmaas_plugins.knn_lm.selection.algorithms import Selection

__all__ = ["Ownership", "held_out_targets", "owner_of", "ownership"]

Floats = npt.NDArray[np.float32]
Halves = npt.NDArray[np.float16]
Ints = npt.NDArray[np.int32]
Indices = npt.NDArray[np.int64]

_PART = 8192
_QUERIES, _SOME = 3000, 250


def owner_of(info: ConversationInfo) -> str | None:
    """Return the only app that may use a conversation, or None if all apps may."""
    return None if info.is_shared else info.app


class Ownership(NamedTuple):
    """Conversation number and owner of each pair; owner 0 stands for all apps."""

    numbers: Ints
    owners: Indices

    def may_use(self, others: Ownership, part: slice) -> npt.NDArray[np.bool_]:
        """Return which pairs each of these may use, among a part of ``others``.

        A pair may use pairs of other conversations that belong to its own app or to all apps.
        """
        numbers, owners = others.numbers[part], others.owners[part]
        is_allowed = (owners == 0) | (owners == self.owners[:, None])
        return is_allowed & (numbers != self.numbers[:, None])


def ownership(
    archive: Archive, indices: npt.NDArray[np.integer], infos: Mapping[int, ConversationInfo]
) -> Ownership:
    """Return the conversation and owner of each of these pairs."""
    names = sorted({owner for info in infos.values() if (owner := owner_of(info)) is not None})
    places = {name: i for i, name in enumerate(names, start=1)}
    by_number = {n: places.get(owner_of(info) or "", 0) for n, info in infos.items()}
    numbers = archive.origin(indices).numbers
    return Ownership(
        numbers, np.array([by_number[number] for number in numbers.tolist()], np.int64)
    )


def held_out_targets(  # noqa: PLR0913, PLR0917 -- the archive, the selection, and data of both
    archive: Archive,
    source: ArchiveSource,
    chosen: Selection,
    keys: Halves,
    infos: Mapping[int, ConversationInfo],
    params: SelectionParams,
    between: Callable[[], None] = lambda: None,
) -> HeldOut:
    """Sample targets from the whole archive, and find their neighbors in other conversations.

    Only neighbors that the target's app may use are considered. They are ranked as in a real
    search: first in the basis, then by exact distances. ``between`` is called between parts.
    """
    rng = np.random.default_rng(params.seed)
    n = len(source.values)
    picks = np.sort(rng.choice(n, min(_QUERIES, n), replace=False))
    queries, users = archive.pairs(picks), ownership(archive, picks, infos)
    wide = queries.keys.astype(np.float32)
    owners = ownership(archive, chosen.indices, infos)
    rows = _nearest(source, (wide, users), (keys, owners), 2 * params.k, between)
    distances = np.empty(rows.shape, np.float32)
    for start in range(0, len(rows), _SOME):
        between()
        some = slice(start, start + _SOME)
        distances[some] = [_exact(*each, keys) for each in zip(wide[some], rows[some], strict=True)]
    order = np.argsort(distances, axis=1, kind="stable")[:, : params.k]
    rows = np.take_along_axis(rows, order, axis=1)
    distances = np.take_along_axis(distances, order, axis=1)
    is_some = np.isfinite(distances[:, 0])
    hits = source.values[chosen.indices][rows] == queries.values[:, None]
    return HeldOut(
        distances[is_some],
        hits[is_some],
        chosen.weights[rows][is_some],
        queries.p_lm[is_some],
        queries.p_max[is_some],
    )


def _nearest(
    source: ArchiveSource,
    asked: tuple[Floats, Ownership],
    stored: tuple[Halves, Ownership],
    n: int,
    between: Callable[[], None],
) -> npt.NDArray[np.intp]:
    """Return the ``n`` nearest rows that each query may use; -1 marks a missing row."""
    (queries, users), (keys, owners) = asked, stored
    projected = source.basis.project(queries)
    rows = np.empty((len(queries), 0), np.intp)
    found = np.empty((len(queries), 0), np.float32)
    for start in range(0, len(keys), _PART):
        between()
        part = source.basis.project(keys[start : start + _PART].astype(np.float32))
        distances = squared_distances(projected, part)
        distances[~users.may_use(owners, slice(start, start + _PART))] = np.inf
        found = np.concatenate([found, distances], axis=1)
        here = np.broadcast_to(np.arange(start, start + len(part)), distances.shape)
        rows = np.concatenate([rows, here], axis=1)
        best = np.argpartition(found, min(n, found.shape[1]) - 1, axis=1)[:, :n]
        rows = np.take_along_axis(rows, best, axis=1)
        found = np.take_along_axis(found, best, axis=1)
    return np.where(np.isfinite(found), rows, -1)


def _exact(query: Floats, rows: npt.NDArray[np.intp], keys: Halves) -> Floats:
    difference = keys[rows].astype(np.float32) - query
    distances = np.einsum("ij,ij->i", difference, difference)
    return np.where(rows < 0, np.float32(np.inf), distances)

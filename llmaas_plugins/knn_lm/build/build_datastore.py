"""From the archive to the selected datastore: select pairs, fit the mixture, write the file."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from llmaas_hooks import StoreError
from llmaas_plugins.knn_lm.archive.archive import Archive, ConversationInfo
from llmaas_plugins.knn_lm.archive.files import SELECTED
from llmaas_plugins.knn_lm.datastore.datastore import Datastore
from llmaas_plugins.knn_lm.datastore.distances import squared_distances
from llmaas_plugins.knn_lm.datastore.pca import Basis, fit_basis
from llmaas_plugins.knn_lm.mixing.grid_search import Fitted, HeldOut, fit, skip_above
from llmaas_plugins.knn_lm.mixing.mixture import Mixture
from llmaas_plugins.knn_lm.selection.algorithms import Selection, offline
from llmaas_plugins.knn_lm.selection.objective import Objective

__all__ = [
    "KEYS_LEVEL",
    "ArchiveSource",
    "Plan",
    "Selected",
    "first_objective",
    "select",
    "source_of",
    "write",
]

Floats = npt.NDArray[np.float32]
Halves = npt.NDArray[np.float16]
Ints = npt.NDArray[np.int32]
Indices = npt.NDArray[np.int64]

KEYS_LEVEL = 1.0
"""Share of the model that computes keys; every datastore uses the whole model."""
_PART = 8192
_SAMPLE = 20_000
_PROBES = 512
_QUERIES = 3000
_NEAREST = 10
_THETA = 0.25
"""Initial theta, as a share of the median squared distance of near neighbors in a sample.

It is close to the values that fitting finds.
"""


@dataclass(frozen=True, slots=True)
class Plan:
    """Parameters of selection.

    Attributes:
        size: L, the most pairs to keep.
        k: Neighbors that are mixed.
        n_dims: Dimensions to scan in; all if there are no more.
        seed: Seed of all random choices.
    """

    size: int = 100_000
    k: int = 100
    n_dims: int = 128
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Selected:
    """Summary of a selected datastore that was written.

    Attributes:
        n_pairs: Pairs selected.
        n_full: Pairs in the archive.
        mixture: Fitted mixture.
        perplexity: Perplexity, with the datastore, of targets from other conversations.
        perplexity_alone: Perplexity of these targets with the model alone.
        skip_above: Smallest probability above which a search is not worth its time.
        skipped: Share of the targets whose search this threshold saves.
    """

    n_pairs: int
    n_full: int
    mixture: Mixture
    perplexity: float
    perplexity_alone: float
    skip_above: float
    skipped: float


class ArchiveSource:
    """An archive as ``selection.Source``, with keys projected on their principal components."""

    def __init__(self, archive: Archive, basis: Basis) -> None:
        """Read the archive's columns; keys are read on request."""
        columns = archive.columns()
        self.values, self.p_lm, self.p_max = columns.values, columns.p_lm, columns.p_max
        self._archive, self.basis = archive, basis
        self.n_dims = len(basis.axes)

    def keys(self, indices: Indices) -> Floats:
        """Return keys of some pairs, read and projected part by part."""
        keys = np.empty((len(indices), self.n_dims), np.float32)
        for start in range(0, len(indices), _PART):
            part = slice(start, start + _PART)
            wide = self._archive.pairs(indices[part]).keys.astype(np.float32)
            keys[part] = self.basis.project(wide)
        return keys


def select(
    archive: Archive, plan: Plan, progress: Callable[[int], None] = lambda _n: None
) -> Selected:
    """Select pairs with Algorithm 1, fit the mixture, and write the datastore beside the archive.

    Raises:
        StoreError: The archive is empty, or the file cannot be written.
    """
    source = source_of(archive, plan)
    objective = first_objective(source, plan.seed)
    selection = offline(source, plan.size, objective, seed=plan.seed, progress=progress)
    return write(archive, source, selection, objective, plan)


def source_of(archive: Archive, plan: Plan) -> ArchiveSource:
    """Return the archive with a basis fitted to a sample of its keys.

    Raises:
        StoreError: The archive is empty.
    """
    if not archive.n_pairs or archive.binding is None:
        raise StoreError(
            f"the datastore in {archive.directory} is empty: nothing to select from. Add "
            "conversations with `llmaas datastore add`."
        )
    rng = np.random.default_rng(plan.seed)
    picks = np.sort(rng.choice(archive.n_pairs, min(_SAMPLE, archive.n_pairs), replace=False))
    n_dims = min(plan.n_dims, archive.binding.n_embd)
    return ArchiveSource(archive, fit_basis(archive.pairs(picks).keys, n_dims, plan.seed))


def first_objective(source: ArchiveSource, seed: int) -> Objective:
    """Return Eq 4's constants before a fit; theta comes from distances between near neighbors."""
    rng = np.random.default_rng(seed)
    n = len(source.values)
    picks = np.sort(rng.choice(n, min(_SAMPLE, n), replace=False))
    keys = source.keys(picks)
    probes = rng.choice(len(keys), min(_PROBES, len(keys)), replace=False)
    nearest = min(_NEAREST, len(keys) - 1)
    distances = np.partition(squared_distances(keys[probes], keys), nearest, axis=1)[
        :, 1 : nearest + 1
    ]
    typical = float(np.median(distances)) if distances.size else 0.0
    return Objective(theta=_THETA * typical or 1.0)


def write(
    archive: Archive,
    source: ArchiveSource,
    selection: Selection,
    objective: Objective,
    plan: Plan,
) -> Selected:
    """Fit the mixture to the selection, and write both.

    Raises:
        StoreError: Nothing was selected, or the file cannot be written.
    """
    binding = archive.binding
    if binding is None or not len(selection):
        raise StoreError(f"nothing was selected from the datastore in {archive.directory}")
    infos = {info.number: info for info in archive.conversations()}
    selection = _by_owner(archive, selection, infos)
    pairs, origin = archive.pairs(selection.indices), archive.origin(selection.indices)
    held_out = _held_out(archive, source, selection, pairs.keys, infos, plan)
    fitted = fit(held_out) if len(held_out.p_lm) else _unfitted(objective.theta)
    threshold, skipped = skip_above(held_out, fitted.mixture)
    numbers, places = np.unique(origin.numbers, return_inverse=True)
    Datastore.write(
        archive.directory / SELECTED,
        fingerprint=binding.fingerprint,
        keys=pairs.keys,
        values=pairs.values,
        weights=selection.weights,
        origins=np.stack([places, origin.positions], axis=1).astype(np.int32),
        conversations=[infos[number].id for number in numbers.tolist()],
        owners=[_owner(infos[number]) for number in numbers.tolist()],
        basis=source.basis,
        settings={
            "mixture": fitted.mixture.as_json(),
            "k": plan.k,
            "skip_above": threshold,
            "key": binding.key_kind,
            "level": KEYS_LEVEL,
        },
    )
    return Selected(
        len(selection),
        len(source.values),
        fitted.mixture,
        fitted.perplexity,
        fitted.perplexity_alone,
        threshold,
        skipped,
    )


def _owner(info: ConversationInfo) -> str | None:
    return None if info.is_shared else info.app


def _by_owner(
    archive: Archive, selection: Selection, infos: Mapping[int, ConversationInfo]
) -> Selection:
    """Order the pairs by owner, so that each owner's pairs are searched as one range."""
    whose = _whose(archive, selection.indices, infos)
    order = np.lexsort((selection.indices, whose.owners))
    return Selection(selection.indices[order], selection.weights[order])


class _Whose(NamedTuple):
    """Conversation number and owner of each pair; owner 0 stands for all apps."""

    numbers: Ints
    owners: Indices

    def may_hear(self, others: _Whose, part: slice) -> npt.NDArray[np.bool_]:
        """Return which pairs each of these may use, among a part of ``others``.

        A pair may use pairs of other conversations that belong to its own app or to all apps.
        """
        numbers, owners = others.numbers[part], others.owners[part]
        is_allowed = (owners == 0) | (owners == self.owners[:, None])
        return is_allowed & (numbers != self.numbers[:, None])


def _whose(
    archive: Archive, indices: npt.NDArray[np.integer], infos: Mapping[int, ConversationInfo]
) -> _Whose:
    names = sorted({owner for info in infos.values() if (owner := _owner(info)) is not None})
    places = {name: i for i, name in enumerate(names, start=1)}
    by_number = {n: places.get(_owner(info) or "", 0) for n, info in infos.items()}
    numbers = archive.origin(indices).numbers
    return _Whose(numbers, np.array([by_number[number] for number in numbers.tolist()], np.int64))


def _unfitted(theta: float) -> Fitted:
    """Return a cautious mixture, with little weight for neighbors and only near ones counting.

    It serves where nothing could be held out, for example with a single conversation.
    """
    return Fitted(Mixture(alpha=0.25, beta=0.5, theta=theta, far=4 * theta), math.nan, math.nan)


def _held_out(  # noqa: PLR0913, PLR0917
    archive: Archive,
    source: ArchiveSource,
    chosen: Selection,
    keys: Halves,
    infos: Mapping[int, ConversationInfo],
    plan: Plan,
) -> HeldOut:
    """Sample targets from the whole archive, and find their neighbors in other conversations.

    Only neighbors that the target's app may use are considered. They are ranked as in a real
    search: first in the basis, then by exact distances.
    """
    rng = np.random.default_rng(plan.seed)
    n = len(source.values)
    picks = np.sort(rng.choice(n, min(_QUERIES, n), replace=False))
    queries, asking = archive.pairs(picks), _whose(archive, picks, infos)
    wide = queries.keys.astype(np.float32)
    others = _whose(archive, chosen.indices, infos)
    rows = _nearest(source, (wide, asking), (keys, others), 2 * plan.k)
    distances = np.stack([_exact(*each, keys) for each in zip(wide, rows, strict=True)])
    order = np.argsort(distances, axis=1, kind="stable")[:, : plan.k]
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
    source: ArchiveSource, asked: tuple[Floats, _Whose], said: tuple[Halves, _Whose], n: int
) -> npt.NDArray[np.intp]:
    """Return the ``n`` nearest rows that each query may use; -1 marks a missing row."""
    (queries, asking), (keys, others) = asked, said
    projected = source.basis.project(queries)
    rows = np.empty((len(queries), 0), np.intp)
    found = np.empty((len(queries), 0), np.float32)
    for start in range(0, len(keys), _PART):
        part = source.basis.project(keys[start : start + _PART].astype(np.float32))
        distances = squared_distances(projected, part)
        distances[~asking.may_hear(others, slice(start, start + _PART))] = np.inf
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

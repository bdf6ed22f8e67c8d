"""The archive as a source of selection: targets, probabilities, and keys projected on a basis."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from llmaas_hooks import StoreError
from llmaas_plugins.knn_lm.archive.archive import Archive
from llmaas_plugins.knn_lm.datastore.distances import squared_distances
from llmaas_plugins.knn_lm.datastore.pca import Basis, fit_basis
from llmaas_plugins.knn_lm.selection.algorithms import Choice
from llmaas_plugins.knn_lm.selection.objective import Objective

__all__ = ["SAMPLE", "ArchiveSource", "SelectionParams", "archive_source", "initial_objective"]

Floats = npt.NDArray[np.float32]
Indices = npt.NDArray[np.int64]

_PART = 8192
SAMPLE = 20_000
"""Most pairs to look at for directions and distances."""
_PROBES = 512
_NEAREST = 10
_THETA = 0.25
"""Initial theta, as a share of the median squared distance of near neighbors in a sample.

It is close to the values that fitting finds.
"""


@dataclass(frozen=True, slots=True)
class SelectionParams:
    """Parameters of selection.

    Attributes:
        size: L, the most pairs to keep.
        k: Neighbors that are mixed.
        n_dims: Dimensions to scan in; all if there are no more.
        seed: Seed of all random choices.
        how: Whether pairs are drawn, or those with the highest bounds taken.
    """

    size: int = 100_000
    k: int = 100
    n_dims: int = 128
    seed: int = 0
    how: Choice = "draw"


class ArchiveSource:
    """An archive as a ``PairSource``, with keys projected on their principal components."""

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


def archive_source(archive: Archive, params: SelectionParams) -> ArchiveSource:
    """Return the archive with a basis fitted to a sample of its keys.

    Raises:
        StoreError: The archive is empty.
    """
    if not archive.n_pairs or archive.binding is None:
        raise StoreError(
            f"the datastore in {archive.directory} is empty: nothing to select from. Add "
            "conversations with `llmaas datastore add`."
        )
    rng = np.random.default_rng(params.seed)
    picks = np.sort(rng.choice(archive.n_pairs, min(SAMPLE, archive.n_pairs), replace=False))
    n_dims = min(params.n_dims, archive.binding.n_embd)
    return ArchiveSource(archive, fit_basis(archive.pairs(picks).keys, n_dims, params.seed))


def initial_objective(source: ArchiveSource, seed: int) -> Objective:
    """Return Eq 4's constants before a fit; theta comes from distances between near neighbors."""
    rng = np.random.default_rng(seed)
    n = len(source.values)
    picks = np.sort(rng.choice(n, min(SAMPLE, n), replace=False))
    keys = source.keys(picks)
    probes = rng.choice(len(keys), min(_PROBES, len(keys)), replace=False)
    nearest = min(_NEAREST, len(keys) - 1)
    distances = np.partition(squared_distances(keys[probes], keys), nearest, axis=1)[
        :, 1 : nearest + 1
    ]
    typical = float(np.median(distances)) if distances.size else 0.0
    return Objective(theta=_THETA * typical or 1.0)

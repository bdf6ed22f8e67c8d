"""The selected datastore as shipped: its file, its scan in fewer dimensions, skipped searches."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmaas_eval.knn.keys import Part
from llmaas_eval.knn.neighbors import search
from llmaas_eval.knn.scoring import Chosen, probability
from llmaas_eval.stats import Surprise
from llmaas_plugins.knn_lm.archive.pairs import Pairs
from llmaas_plugins.knn_lm.datastore.datastore import Datastore
from llmaas_plugins.knn_lm.datastore.pca import fit_basis
from llmaas_plugins.knn_lm.mixing.grid_search import HeldOut
from llmaas_plugins.knn_lm.mixing.mixture import Mixture

__all__ = ["DIMS", "Searched", "exactly", "shipped"]

DIMS = (32, 64, 96, 128, 192, 256)


class Searched(NamedTuple):
    """Result of searching a datastore for every target.

    Attributes:
        met: Neighbors of the targets.
        rows: Row numbers of these neighbors in the datastore; ``(n, k)``.
    """

    met: HeldOut
    rows: NDArray[np.int32]

    def recall(self, exact: Searched) -> float:
        """Return the share of the found neighbors that are also in the exact result."""
        each = zip(self.rows, exact.rows, strict=True)
        return float(np.mean([np.isin(own, other).mean() for own, other in each]))

    def surprise(self, mixture: Mixture, part: Part, threshold: float = 2.0) -> Surprise:
        """Return the targets' surprisal; where MaxProb reaches ``threshold``, do not mix."""
        p = probability(mixture, self.met, part, has_trust=True)
        return Surprise.of(np.where(part.max >= threshold, part.p, p), part.conv)


def exactly(history: Pairs, chosen: Chosen, part: Part, k: int) -> Searched:
    """Search exactly with NumPy in F32."""
    keys = history.keys[chosen.rows]
    (found,) = search(part.ffn, keys, [np.arange(len(keys))], k)
    return _searched(history, chosen, part, found.rows, found.distances)


def shipped(history: Pairs, chosen: Chosen, part: Part, k: int, n_dims: int) -> Searched:
    """Search with the datastore: scan codes of ``n_dims`` dimensions, then rescore F16 keys."""
    keys = history.keys[chosen.rows]
    basis = None if n_dims >= history.n_embd else fit_basis(keys, n_dims)
    origins = np.stack([np.zeros(len(keys)), np.arange(len(keys))], axis=1).astype(np.int32)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "datastore.knn"
        Datastore.write(
            path,
            fingerprint=bytes(32),
            keys=keys,
            values=history.values[chosen.rows],
            origins=origins,
            conversations=["all"],
            basis=basis,
            settings={},
        )
        datastore = Datastore.open(path, None)
        found = [datastore.search(query, k) for query in part.ffn.astype(np.float32)]
    rows = np.stack([each.rows for each in found])
    return _searched(history, chosen, part, rows, np.stack([each.distances for each in found]))


def _searched(
    history: Pairs,
    chosen: Chosen,
    part: Part,
    rows: NDArray[np.int32],
    distances: NDArray[np.float32],
) -> Searched:
    weights = np.ones(len(chosen.rows), np.float32) if chosen.weights is None else chosen.weights
    hits = history.values[chosen.rows][rows] == part.values[:, None]
    return Searched(HeldOut(distances, hits, weights[rows], part.p, part.max), rows)

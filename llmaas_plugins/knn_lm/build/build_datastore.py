"""From the archive to the selected datastore: select pairs, fit the mixture, write the file."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from llmaas_hooks import StoreError
from llmaas_plugins.knn_lm.archive.archive import Archive
from llmaas_plugins.knn_lm.archive.conversation_info import ConversationInfo
from llmaas_plugins.knn_lm.archive.files import SELECTED
from llmaas_plugins.knn_lm.archive.segments import Binding
from llmaas_plugins.knn_lm.build.archive_source import (
    ArchiveSource,
    SelectionParams,
    archive_source,
    initial_objective,
)
from llmaas_plugins.knn_lm.build.held_out import held_out_targets, owner_of, ownership
from llmaas_plugins.knn_lm.datastore.datastore import Datastore
from llmaas_plugins.knn_lm.mixing.grid_search import FitResult, fit_mixture, search_threshold
from llmaas_plugins.knn_lm.mixing.mixture import Mixture
from llmaas_plugins.knn_lm.selection.algorithms import Selection, offline
from llmaas_plugins.knn_lm.selection.objective import Objective

__all__ = ["KEYS_LEVEL", "BuildResult", "build_datastore", "fit_and_write"]

KEYS_LEVEL = 1.0
"""Share of the model that computes keys; every datastore uses the whole model."""


@dataclass(frozen=True, slots=True)
class BuildResult:
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


def build_datastore(
    archive: Archive, params: SelectionParams, progress: Callable[[int], None] = lambda _n: None
) -> BuildResult:
    """Select pairs with Algorithm 1, fit the mixture, and write the datastore beside the archive.

    Raises:
        StoreError: The archive is empty, or the file cannot be written.
    """
    source = archive_source(archive, params)
    objective = initial_objective(source, params.seed)
    selection = offline(
        source, params.size, objective, how=params.how, seed=params.seed, progress=progress
    )
    return fit_and_write(archive, source, selection, objective, params)


def fit_and_write(  # noqa: PLR0913 -- what to fit, to what, and a callback
    archive: Archive,
    source: ArchiveSource,
    selection: Selection,
    objective: Objective,
    params: SelectionParams,
    *,
    between: Callable[[], None] = lambda: None,
) -> BuildResult:
    """Fit the mixture to the selection, and write both.

    ``between`` is called between parts of the work. An exception that it raises ends the work, and
    an existing datastore is unchanged.

    Raises:
        StoreError: Nothing was selected, or the file cannot be written.
    """
    binding = archive.binding
    if binding is None or not len(selection):
        raise StoreError(f"nothing was selected from the datastore in {archive.directory}")
    infos = {info.number: info for info in archive.conversations()}
    selection = _by_owner(archive, selection, infos)
    pairs, origin = archive.pairs(selection.indices), archive.origin(selection.indices)
    held_out = held_out_targets(archive, source, selection, pairs.keys, infos, params, between)
    between()
    fitted = fit_mixture(held_out) if len(held_out.p_lm) else _unfitted(objective.theta)
    threshold, skipped = search_threshold(held_out, fitted.mixture)
    numbers, places = np.unique(origin.numbers, return_inverse=True)
    Datastore.write(
        archive.directory / SELECTED,
        fingerprint=binding.fingerprint,
        keys=pairs.keys,
        values=pairs.values,
        weights=selection.weights,
        origins=np.stack([places, origin.positions], axis=1).astype(np.int32),
        conversations=[infos[number].id for number in numbers.tolist()],
        owners=[owner_of(infos[number]) for number in numbers.tolist()],
        basis=source.basis,
        settings=_settings(fitted.mixture, params, threshold, binding),
        between=between,
    )
    return BuildResult(
        len(selection),
        len(source.values),
        fitted.mixture,
        fitted.perplexity,
        fitted.perplexity_alone,
        threshold,
        skipped,
    )


def _settings(
    mixture: Mixture, params: SelectionParams, skip_above: float, binding: Binding
) -> dict[str, Any]:
    return {
        "mixture": mixture.as_json(),
        "k": params.k,
        "how": params.how,
        "skip_above": skip_above,
        "key": binding.key_kind,
        "level": KEYS_LEVEL,
    }


def _by_owner(
    archive: Archive, selection: Selection, infos: Mapping[int, ConversationInfo]
) -> Selection:
    """Order the pairs by owner, so that each owner's pairs are searched as one range."""
    owned = ownership(archive, selection.indices, infos)
    order = np.lexsort((selection.indices, owned.owners))
    return Selection(selection.indices[order], selection.weights[order])


def _unfitted(theta: float) -> FitResult:
    """Return a cautious mixture, with little weight for neighbors and only near ones counting.

    It serves where nothing could be held out, for example with a single conversation.
    """
    return FitResult(Mixture(alpha=0.25, beta=0.5, theta=theta, far=4 * theta), math.nan, math.nan)

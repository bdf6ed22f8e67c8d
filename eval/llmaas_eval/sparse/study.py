"""Study of sparse decoding: all measurements as one JSON document."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from llmaas_eval.sparse.locality import likeness, selection, spread, traces
from llmaas_eval.sparse.ours import engine_perplexity, with_channels
from llmaas_eval.sparse.policies import POLICIES, Scores, Trace, hit_rate, simulate
from llmaas_eval.sparse.reads import ONE_BILLION, Flash, Order, busiest_first, predicted, read_cost
from llmaas_eval.sparse.scales import DRAWS, fit_sigma
from llmaas_eval.sparse.texts import Texts, Tokens

if TYPE_CHECKING:
    from llmaas_eval.sparse.oracle import Oracle

__all__ = ["Row", "SparseSettings", "study"]

Row = dict[str, Any]

_HIT_SIZES = np.arange(0.1, 0.95, 0.1).round(1).tolist()
_READ_POLICIES = ("LFU, context", "LFU, halved every 32", "static", "Belady")
_GLOBAL = "LFU, task"
_SPARSE, _HOT = 0.5, (0.1, 0.5)


@dataclass(frozen=True, slots=True)
class SparseSettings:
    """Parameters of the study.

    Attributes:
        sparsities: Sparsities at which perplexity is measured.
        n_prompt: Number of each context's first tokens that are computed with all channels.
        n_read_contexts: Number of contexts whose reads are simulated, which is the slowest part.
        read_sizes: Shares of the channels that are cached in that simulation.
        groups: Numbers of layers in a group in that simulation.
    """

    sparsities: tuple[float, ...] = (0.0, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
    n_prompt: int = 64
    n_read_contexts: int = 2
    read_sizes: tuple[float, ...] = (0.2, 0.3, 0.4, 0.5)
    groups: tuple[int, ...] = (1, 2, 4, 8)


def study(model: Path, texts: Texts, settings: SparseSettings) -> dict[str, list[Row]]:
    """Return tables by name, as rows of named values."""
    from llmaas_eval.sparse.oracle import Oracle

    oracle = Oracle(model)
    oracle.calibrate(texts.calibration)
    found: dict[str, list[Row]] = {"perplexity": _perplexities(oracle, texts.windows, settings)}
    found["engine"] = _engine(model, texts, settings)
    found["likeness"] = _likeness(oracle, np.concatenate(list(texts.contexts.values())), settings)
    for name in ("hits", "selection", "spread", "reads"):
        found[name] = []
    for sparsity in (_SPARSE, 0.6):
        for task, contexts in texts.contexts.items():
            oracle.mask(sparsity, "threshold", settings.n_prompt)
            for family, trace in traces(oracle, contexts, sparsity, settings.n_prompt):
                about = {"sparsity": sparsity, "task": task, "family": family}
                for name, rows in _of_trace(trace, family, settings).items():
                    found[name] += [about | row for row in rows]
    return found


def _perplexities(oracle: Oracle, windows: Tokens, settings: SparseSettings) -> list[Row]:
    from llmaas_eval.sparse.oracle import SELECTIONS, perplexities

    return [
        {"selection": way, "dense": n_dense, "sparsity": sparsity, "perplexity": value}
        for way in SELECTIONS
        for n_dense in (0, settings.n_prompt)
        for sparsity, value in perplexities(
            oracle, windows, settings.sparsities, way, n_dense
        ).items()
    ]


def _engine(model: Path, texts: Texts, settings: SparseSettings) -> list[Row]:
    """Return the perplexity of the engine's own sparse tokens, to compare with the oracle's."""
    ways = ("threshold", "top-k")
    with tempfile.TemporaryDirectory() as folder:
        path = with_channels(model, Path(folder), texts.calibration)
        return [
            {"selection": way, "dense": settings.n_prompt, "sparsity": _SPARSE, "perplexity": value}
            for way in ways
            for value in [engine_perplexity(path, texts.windows, _SPARSE, way, settings.n_prompt)]
        ]


def _likeness(oracle: Oracle, contexts: Tokens, settings: SparseSettings) -> list[Row]:
    rows: list[Row] = []
    for sparsity in (0.0, _SPARSE):
        oracle.mask(sparsity, "threshold", settings.n_prompt)
        found = likeness(oracle, contexts, settings.n_prompt, _SPARSE)
        rows += [{"sparsity": sparsity} | row._asdict() for row in found]
    return rows


def _of_trace(trace: Trace, family: str, settings: SparseSettings) -> Mapping[str, Sequence[Row]]:
    few = Trace(trace.active[: settings.n_read_contexts], trace.n_prompt, trace.busy)
    return {
        "hits": list(_hits(trace, family)),
        "selection": [{"hottest": share} | selection(trace, share)._asdict() for share in _HOT],
        "spread": [_spread(trace, family)],
        "reads": list(_reads(few, family, settings)),
    }


def _spread(trace: Trace, family: str) -> Row:
    found = spread(trace)
    draws, sparsity = DRAWS[family](), 1 - float(trace.decoded.mean())
    sigmas = [fit_sigma(draws, sparsity, value) for value in found.coverage]
    return found._asdict() | {"sigma": sigmas}


def _hits(trace: Trace, family: str) -> Iterator[Row]:
    systems = [(name, trace, policy) for name, policy in POLICIES.items()]
    systems.append((f"{_GLOBAL}, global", trace.pooled(), POLICIES[_GLOBAL]))
    for name, one, policy in tqdm(systems, desc=f"hits, {family}", disable=None):
        scores = policy(one)
        for size in _HIT_SIZES:
            rate = hit_rate(one, scores, round(size * one.busy.shape[1]))
            yield {"policy": name, "size": size, "rate": rate}


def _reads(trace: Trace, family: str, settings: SparseSettings) -> Iterator[Row]:
    for policy in tqdm(_READ_POLICIES, desc=f"reads, {family}", disable=None):
        scores = POLICIES[policy](trace)
        for size, n_group in product(settings.read_sizes, settings.groups):
            about = {"policy": policy, "size": size, "layers": n_group}
            yield from (about | row for row in _group_reads(trace, scores, family, about))


def _group_reads(trace: Trace, scores: Scores, family: str, about: Row) -> Iterator[Row]:
    n_group, n_channels = about["layers"], trace.busy.shape[1]
    busiest = busiest_first(trace, n_group)
    by_index: Order = np.broadcast_to(np.arange(n_channels), busiest.shape)
    ahead = predicted(trace, n_group)
    for is_ahead in (False, True):
        capacity = round(about["size"] * n_channels)
        misses = simulate(trace, scores, capacity, ahead if is_ahead else None)
        for name, order in (("index", by_index), ("busiest", busiest)):
            cost = read_cost(misses, order, n_group, ONE_BILLION[family], Flash())
            yield {
                "ahead": is_ahead,
                "order": name,
                "ahead_us": cost.ahead.us,
                "on_demand_us": cost.on_demand.us,
                "n_reads": cost.ahead.n_reads + cost.on_demand.n_reads,
                "n_bytes": cost.ahead.n_bytes + cost.on_demand.n_bytes,
            }

"""Figures of a comparison, as they are kept: speed with intervals, quality, and memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from llmaas_hooks import LlmaasError
from llmaas_plugins.cli.doctor.trial import left_alone
from llmaas_plugins.cli.tune.worker import Followed, State
from llmaas_plugins.demo.interval import Interval, interval, median_interval, resamples

__all__ = ["Case", "Figures", "Pair", "case_of", "figures_of"]


class Pair(NamedTuple):
    """The same request on both sides.

    Attributes:
        vanilla: Request on the side that is compared with.
        feature: Request on the side with the feature.
        group: Number of the text that it is of. Requests of a text are no independent sample.
    """

    vanilla: Followed
    feature: Followed
    group: int = 0


class _Kept(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Case(_Kept):
    """Comparison of one way to use a feature with vanilla llama.cpp.

    Attributes:
        name: The way, in words.
        first_speed: Speed of the first token, relative to vanilla.
        token_speed: Speed of each further token, relative to vanilla.
        agreement: Share of the tokens whose most likely token is vanilla's.
        loss_change: Change of the negative log-likelihood of a token, in nats.
        is_same: Whether every most likely token is vanilla's.
        n_pairs: Number of requests on each side.
    """

    name: str
    first_speed: Interval
    token_speed: Interval | None
    agreement: float
    loss_change: Interval
    is_same: bool
    n_pairs: int


class Figures(_Kept):
    """Figures of a part.

    Attributes:
        cases: The comparisons.
        peak_bytes: Peak memory of the process with the feature.
        vanilla_peak_bytes: Peak memory of the process without it.
        unserved: Reason why the plugin leaves the model alone; None if it serves it.
        broken: Promises that were not kept, in words.
    """

    cases: tuple[Case, ...] = ()
    peak_bytes: int | None = None
    vanilla_peak_bytes: int | None = None
    unserved: str | None = None
    broken: tuple[str, ...] = ()


def case_of(name: str, pairs: Sequence[Pair]) -> Case:
    """Return the figures of requests on both sides.

    Raises:
        LlmaasError: The model's outputs are not finite.
    """
    if not all(np.isfinite(side.losses).all() for pair in pairs for side in pair[:2]):
        raise LlmaasError(f"the model's outputs are not finite ({name}).")
    same = np.concatenate([pair.vanilla.best == pair.feature.best for pair in pairs])
    return Case(
        name=name,
        first_speed=_speed([(one.vanilla.first_s, one.feature.first_s) for one in pairs]),
        token_speed=_speed([(one.vanilla.token_s, one.feature.token_s) for one in pairs])
        if all(math.isfinite(one.vanilla.token_s) for one in pairs)
        else None,
        agreement=float(same.mean()),
        loss_change=_loss_change(pairs),
        is_same=bool(same.all()),
        n_pairs=len(pairs),
    )


def figures_of(  # noqa: PLR0913  figures consist of these
    plugin: str,
    cases: Sequence[Case],
    feature: State,
    vanilla: State | None = None,
    *,
    broken: Sequence[str] = (),
    unserved: str | None = None,
) -> Figures:
    """Return a part's figures.

    Args:
        plugin: Name of the plugin.
        cases: Comparisons.
        feature: State of the side with the plugin.
        vanilla: State of the side without it.
        broken: Promises that were not kept.
        unserved: Reason why the plugin does nothing here, if the part knows one.
    """
    reason = left_alone(feature.plugins.get(plugin) or {}) or unserved
    return Figures(
        cases=tuple(cases),
        peak_bytes=feature.peak_bytes,
        vanilla_peak_bytes=None if vanilla is None else vanilla.peak_bytes,
        unserved=reason,
        broken=tuple(broken),
    )


# -- inside --------------------------------------------------------------------------------------


def _speed(seconds: Sequence[tuple[float, float]]) -> Interval:
    vanilla_s, feature_s = np.array(seconds, np.float64).T
    return median_interval(vanilla_s / feature_s)


def _loss_change(pairs: Sequence[Pair]) -> Interval:
    """Return the mean change of a token's loss, with an interval over texts."""
    by_text: dict[int, list[NDArray[np.float64]]] = {}
    for i, pair in enumerate(pairs):
        change = pair.feature.losses - pair.vanilla.losses
        by_text.setdefault(pair.group or -1 - i, []).append(change)
    means = np.array([np.concatenate(changes).mean() for changes in by_text.values()])
    return interval(float(means.mean()), means[resamples(len(means))].mean(axis=1))

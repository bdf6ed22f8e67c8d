"""Traces of ElastiLM's six apps (§5.1), rebuilt: how often each app asks, when, and what.

The released traces hold a wrong column for two apps, and no arrival times. The sign of their alpha
is the opposite of the text's. Here, as in the text, a larger alpha means more relaxed promises.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from llmaas_eval.deadlines.study import APPS

__all__ = ["ALPHAS", "APP_NAMES", "SHARES", "Arrival", "Shares", "counts", "trace"]

ALPHAS = (-0.25, 0.0, 0.25)
_LEAST_ANSWER, _MOST_ANSWER = 16, 32


class Shares(NamedTuple):
    """Promise of an app, as shares of the whole model's times."""

    ttft: float
    tpot: float


SHARES: Mapping[str, Shares] = {
    app: Shares(*(float(one.removesuffix(" %")) / 100 for one in limits))
    for app, limits in reversed(APPS.items())
}
"""Promises by app, tightest first."""
APP_NAMES = tuple(SHARES)


class Arrival(NamedTuple):
    """One request of a trace.

    Attributes:
        number: Place in the trace, from 0.
        app: Name of the app.
        question: Index among the app's questions.
        at: Time of arrival, in mean gaps between requests.
        n_answer: Tokens of the answer.
    """

    number: int
    app: str
    question: int
    at: float
    n_answer: int


def counts(alpha: float, n: int) -> Mapping[str, int]:
    """Return how many of ``n`` requests each app has: in proportion to e^(alpha i).

    The tightest app has i = 1.
    Quotas are rounded by the largest remainders, so that the sum is ``n``.
    """
    weights = np.exp(alpha * np.arange(1, len(APP_NAMES) + 1))
    quotas = n * weights / weights.sum()
    whole = np.floor(quotas + 1e-9).astype(int)
    order = np.argsort(whole - quotas, kind="stable")
    whole[order[: n - whole.sum()]] += 1
    return dict(zip(APP_NAMES, whole.tolist(), strict=True))


def trace(alpha: float, n: int, seed: int, n_questions: Mapping[str, int]) -> list[Arrival]:
    """Return requests in the order of their Poisson arrivals.

    An app asks each of its questions once before it asks one again. The arrivals of one seed are
    the same at every rate, apart from the unit of time, and so are the answers' lengths.

    Args:
        alpha: Weight of the relaxed apps.
        n: Number of requests.
        seed: Seed of everything that is drawn.
        n_questions: Number of questions that each app has.
    """
    chance = np.random.default_rng([seed, round(1000 * (alpha + 10))])
    numbers = counts(alpha, n)
    apps = chance.permutation([app for app, count in numbers.items() for _ in range(count)])
    turns = {
        app: np.concatenate(
            [chance.permutation(n_questions[app]) for _ in range(count // n_questions[app] + 1)]
        ).tolist()
        for app, count in numbers.items()
    }
    times = np.cumsum(chance.exponential(size=n))
    lengths = chance.integers(_LEAST_ANSWER, _MOST_ANSWER, size=n, endpoint=True)
    return [
        Arrival(number, str(app), turns[str(app)].pop(), float(times[number]), int(lengths[number]))
        for number, app in enumerate(apps)
    ]

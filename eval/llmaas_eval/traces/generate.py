"""Generation of traces: the context, time and tokens of each call.

All randomness comes from ``random.Random.random()``. Python promises to keep only this method's
sequence, so a seed gives the same trace on every machine.
"""

from __future__ import annotations

import csv
import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from llmaas_eval.traces.families import FAMILIES, Texts, family_texts
from llmaas_eval.traces.types import Trace, TraceCall

__all__ = ["PATTERNS", "Settings", "generate"]


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings that determine a trace, except for its texts.

    Attributes:
        pattern: Way to choose the next call's context; one of ``PATTERNS``.
        contexts: Number of contexts; the families get them in turn.
        hours: Length of the trace.
        rate_minutes: Mean time between two calls, which arrive as a Poisson process.
        max_tokens: Longest context; no call adds more.
        seed: Seed of the random numbers.
    """

    pattern: str = "markov"
    contexts: int = 16
    hours: float = 72.0
    rate_minutes: float = 5.0
    max_tokens: int = 2048
    seed: int = 0


def generate(settings: Settings, data: Path | None = None, arrivals: Path | None = None) -> Trace:
    """Generate a trace.

    Args:
        settings: Settings of the trace.
        data: Folder with the data sets for the calls' texts; calls have no texts without it.
        arrivals: CSV file (``TIMESTAMP,ContextTokens,GeneratedTokens``) with real arrivals and
            lengths, for pattern ``azure``; ``rate_minutes`` is then ignored.

    Raises:
        ValueError: The pattern is unknown, lacks its file of arrivals, or does not use one.
        FileNotFoundError: ``data`` lacks a family's files.
    """
    if settings.pattern not in PATTERNS or (settings.pattern == "azure") != (arrivals is not None):
        known = ", ".join(PATTERNS)
        raise ValueError(
            f"found pattern {settings.pattern!r} and arrivals {arrivals}, expected one of {known}, "
            "with a file of arrivals for azure only"
        )
    rng = random.Random(settings.seed)  # noqa: S311 - not for security
    names = list(itertools.islice(itertools.cycle(FAMILIES), settings.contexts))
    texts = None if data is None else _texts(data, names)
    pick = PATTERNS[settings.pattern](names, rng)
    calls = []
    for time_s, lengths in _timed(settings, arrivals, rng):
        context = pick()
        n_prompt, n_reply = lengths or _lengths(names[context], settings.max_tokens, rng)
        prompt, truth = (None, None) if texts is None else texts[context].take(n_prompt)
        calls.append(TraceCall(time_s, context, names[context], n_prompt, n_reply, prompt, truth))
    more = {"texts": data is not None, "arrivals": None if arrivals is None else arrivals.name}
    return Trace({**asdict(settings), **more}, calls)


def _texts(data: Path, names: list[str]) -> list[Texts]:
    """Return each context's texts; contexts of one family begin at different rows."""
    rows = {name: family_texts(data, name) for name in dict.fromkeys(names)}
    return [Texts(rows[name], i / len(names)) for i, name in enumerate(names)]


# -- when, and how much -------------------------------------------------------------------------


def _timed(
    settings: Settings, arrivals: Path | None, rng: random.Random
) -> Iterator[tuple[float, tuple[int, int] | None]]:
    """Yield the time of each call in seconds, with its lengths if the arrivals give them."""
    end_s = settings.hours * 3600
    if arrivals is not None:
        found = _recorded(arrivals, settings.max_tokens)
        yield from itertools.takewhile(lambda call: call[0] <= end_s, found)
        return
    time_s = 0.0
    while True:
        time_s += -math.log(1.0 - rng.random()) * settings.rate_minutes * 60
        if time_s > end_s:
            return
        yield round(time_s, 3), None  # rounded: machines may differ in the logarithm's last bit


def _recorded(path: Path, max_tokens: int) -> Iterator[tuple[float, tuple[int, int]]]:
    first: datetime | None = None
    with path.open(newline="", encoding="utf-8") as lines:
        for row in csv.DictReader(lines):
            when = datetime.fromisoformat(row["TIMESTAMP"][:26])  # cut after microseconds
            first = first or when
            n_reply = min(max(int(row["GeneratedTokens"]), 1), max_tokens // 2)
            n_prompt = min(max(int(row["ContextTokens"]), 1), max_tokens - n_reply)
            yield round((when - first).total_seconds(), 3), (n_prompt, n_reply)


def _lengths(name: str, max_tokens: int, rng: random.Random) -> tuple[int, int]:
    """Draw the tokens of prompt and reply; their sum is uniform over the family's range."""
    family = FAMILIES[name]
    n_delta = family.low + int(rng.random() * (family.high - family.low + 1))
    n_delta = max(2, min(n_delta, max_tokens))
    n_reply = max(1, round(n_delta * family.reply_share))
    return n_delta - n_reply, n_reply


# -- who ----------------------------------------------------------------------------------------

Pick = Callable[[], int]


def _draw(weights: list[float], rng: random.Random) -> int:
    """Draw an index with probability proportional to its weight."""
    left = rng.random() * sum(weights)
    for i, weight in enumerate(weights):
        left -= weight
        if left < 0:
            return i
    return len(weights) - 1


def _random(names: list[str], rng: random.Random) -> Pick:
    """Pick all contexts with equal probability."""
    return lambda: _draw([1.0] * len(names), rng)


def _markov(names: list[str], rng: random.Random) -> Pick:
    """Prefer recently used contexts: the ``k``-th most recent has a probability ∝ ``1 / k``.

    The state is the order of use, so this is a first-order Markov process.
    """
    recent = list(range(len(names)))
    weights = [1 / k for k in range(1, len(names) + 1)]

    def pick() -> int:
        recent.insert(0, recent.pop(_draw(weights, rng)))
        return recent[0]

    return pick


def _gaussian(names: list[str], rng: random.Random) -> Pick:
    """Prefer contexts whose calls add about as many tokens as the mean of all families.

    The weights are a normal distribution over the families' mean numbers of tokens.
    """
    means = [family.mean for family in FAMILIES.values()]
    center = sum(means) / len(means)
    spread = math.sqrt(sum((mean - center) ** 2 for mean in means) / len(means))
    far = [(FAMILIES[name].mean - center) / spread for name in names]
    weights = [math.exp(-(x**2) / 2) for x in far]
    return lambda: _draw(weights, rng)


PATTERNS: Mapping[str, Callable[[list[str], random.Random], Pick]] = {
    "markov": _markov,
    "random": _random,
    "gaussian": _gaussian,
    "azure": _markov,  # its rows do not name their context
}
"""Ways to choose the next call's context, by name."""

"""Who calls, when, and with how much.

All chance comes from ``random.Random.random()``: the one method whose sequence Python promises to
keep, so that a seed gives the same trace on every machine.
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
from llmaas_eval.traces.types import Call, Trace

__all__ = ["PATTERNS", "Settings", "generate"]


@dataclass(frozen=True, slots=True)
class Settings:
    """What decides a trace, texts apart.

    Attributes:
        pattern: Which context is called next; one of ``PATTERNS``.
        contexts: How many there are; they are given to the families in turn.
        hours: Length of the trace.
        rate_minutes: Mean time between two calls, which arrive as a Poisson process.
        max_tokens: Longest context; no call adds more.
        seed: Of all chance.
    """

    pattern: str = "markov"
    contexts: int = 16
    hours: float = 72.0
    rate_minutes: float = 5.0
    max_tokens: int = 2048
    seed: int = 0


def generate(settings: Settings, data: Path | None = None, arrivals: Path | None = None) -> Trace:
    """Make a trace.

    Args:
        settings: What decides it.
        data: Folder with the data sets that give the calls their texts.
        arrivals: CSV file (``TIMESTAMP,ContextTokens,GeneratedTokens``) with real arrivals and
            lengths, for pattern ``azure``; ``rate_minutes`` counts for nothing then.

    Raises:
        ValueError: Unknown pattern, or one without the file it needs.
        FileNotFoundError: ``data`` lacks a family's files.
    """
    if settings.pattern not in PATTERNS or (settings.pattern == "azure") != (arrivals is not None):
        known = ", ".join(PATTERNS)
        raise ValueError(
            f"found pattern {settings.pattern!r} and arrivals {arrivals}, expected one of {known}, "
            "with a file of arrivals for azure and for nothing else"
        )
    rng = random.Random(settings.seed)  # noqa: S311 - a trace, no secret
    names = list(itertools.islice(itertools.cycle(FAMILIES), settings.contexts))
    texts = None if data is None else _texts(data, names)
    pick = PATTERNS[settings.pattern](names, rng)
    calls = []
    for time_s, lengths in _timed(settings, arrivals, rng):
        context = pick()
        n_prompt, n_reply = lengths or _lengths(names[context], settings.max_tokens, rng)
        prompt, truth = (None, None) if texts is None else texts[context].take(n_prompt)
        calls.append(Call(time_s, context, names[context], n_prompt, n_reply, prompt, truth))
    more = {"texts": data is not None, "arrivals": None if arrivals is None else arrivals.name}
    return Trace({**asdict(settings), **more}, calls)


def _texts(data: Path, names: list[str]) -> list[Texts]:
    """Each context's texts; those of one family begin at different rows."""
    rows = {name: family_texts(data, name) for name in dict.fromkeys(names)}
    return [Texts(rows[name], i / len(names)) for i, name in enumerate(names)]


# -- when, and how much -------------------------------------------------------------------------


def _timed(
    settings: Settings, arrivals: Path | None, rng: random.Random
) -> Iterator[tuple[float, tuple[int, int] | None]]:
    """Time of each call, with its tokens where these are given."""
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
        yield round(time_s, 3), None  # machines may differ in the logarithm's last bit


def _recorded(path: Path, max_tokens: int) -> Iterator[tuple[float, tuple[int, int]]]:
    first: datetime | None = None
    with path.open(newline="", encoding="utf-8") as lines:
        for row in csv.DictReader(lines):
            when = datetime.fromisoformat(row["TIMESTAMP"][:26])  # it takes no more than us
            first = first or when
            n_reply = min(max(int(row["GeneratedTokens"]), 1), max_tokens // 2)
            n_prompt = min(max(int(row["ContextTokens"]), 1), max_tokens - n_reply)
            yield round((when - first).total_seconds(), 3), (n_prompt, n_reply)


def _lengths(name: str, max_tokens: int, rng: random.Random) -> tuple[int, int]:
    """Tokens of prompt and reply: their sum is even between the family's least and most."""
    family = FAMILIES[name]
    n_delta = family.low + int(rng.random() * (family.high - family.low + 1))
    n_delta = max(2, min(n_delta, max_tokens))
    n_reply = max(1, round(n_delta * family.reply_share))
    return n_delta - n_reply, n_reply


# -- who ----------------------------------------------------------------------------------------

Pick = Callable[[], int]


def _draw(weights: list[float], rng: random.Random) -> int:
    """Index of a weight, with the chance that it stands for."""
    left = rng.random() * sum(weights)
    for i, weight in enumerate(weights):
        left -= weight
        if left < 0:
            return i
    return len(weights) - 1


def _random(names: list[str], rng: random.Random) -> Pick:
    """All alike."""
    return lambda: _draw([1.0] * len(names), rng)


def _markov(names: list[str], rng: random.Random) -> Pick:
    """Recently used ones rather: the one used ``k``-th last has chance ``1 / k``, scaled.

    The order of use is the state, so the process is of first order.
    """
    recent = list(range(len(names)))
    weights = [1 / k for k in range(1, len(names) + 1)]

    def pick() -> int:
        recent.insert(0, recent.pop(_draw(weights, rng)))
        return recent[0]

    return pick


def _gaussian(names: list[str], rng: random.Random) -> Pick:
    """By how much their calls add: a normal distribution around the families' mean."""
    means = [family.mean for family in FAMILIES.values()]
    centre = sum(means) / len(means)
    spread = math.sqrt(sum((mean - centre) ** 2 for mean in means) / len(means))
    far = [(FAMILIES[name].mean - centre) / spread for name in names]
    weights = [math.exp(-(x**2) / 2) for x in far]
    return lambda: _draw(weights, rng)


PATTERNS: Mapping[str, Callable[[list[str], random.Random], Pick]] = {
    "markov": _markov,
    "random": _random,
    "gaussian": _gaussian,
    "azure": _markov,  # its rows do not say whose they are
}
"""Ways to choose the next context."""

"""Both sides of a comparison, the texts that they read, and the time that it may take."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from llmaas_hooks import ConfigError, LlmaasError
from llmaas_plugins.cli.models import trained_context
from llmaas_plugins.cli.tune.figures import Pair
from llmaas_plugins.cli.tune.worker import Followed, Led, Side, State, serve
from llmaas_plugins.config import Config, PluginTable
from llmaas_plugins.worker_process import WorkerProcess, worker_process

__all__ = [
    "LEAST_ROUNDS",
    "MOST_ROUNDS",
    "Bench",
    "Engine",
    "Lengths",
    "Piece",
    "TimeIsUpError",
    "in_turn",
]

_THEN = "Close other programs, or use a smaller model."
_MOST_CTX = 1024
_LENGTHS = ((512, 64), (256, 32), (128, 32), (64, 16), (32, 8))
"""Tokens of a prompt and of its answer, which are as long as the time allows."""
LEAST_ROUNDS, MOST_ROUNDS = 5, 12
"""Pairs of requests: as few as give an interval, and as many as are worth their time."""
_N_PROBE, _N_ANSWER = 64, 8
_PLANNED = 0.8
"""Share of the time for which rounds are planned; the rest is for loading and for surprises."""


class TimeIsUpError(LlmaasError):
    """The time for all parts is up."""


class Lengths(NamedTuple):
    """Tokens of a prompt, and of its answer."""

    n_prompt: int
    n_answer: int


class Piece(NamedTuple):
    """Part of a text, as tokens."""

    prompt: list[int]
    answer: list[int]


class Engine:
    """An engine in a process of its own."""

    def __init__(self, process: WorkerProcess, check_time: Callable[[], None]) -> None:
        """Take the process that serves it, and what raises an error once the time is up."""
        self._process, self._check_time = process, check_time

    def follow(self, led: Led) -> Followed:
        """Read a prompt, and be led through its answer.

        Raises:
            TimeIsUpError: The time for all parts is up.
        """
        self._check_time()
        return self._asked("follow", led)

    def tokens(self, text: bytes, *, has_start: bool = False) -> list[int]:
        """Return the tokens of a text; with ``has_start``, as a text begins."""
        return self._asked("tokens", text, has_start)

    def chat(self, messages: Sequence[dict[str, str]]) -> list[int] | None:
        """Return a conversation's tokens; None if the model's chat template refuses it."""
        return self._asked("chat", list(messages))

    def state(self) -> State:
        """Return memory and the plugins' reports."""
        return self._asked("state")

    def _asked(self, *request: object) -> Any:
        return self._process.ask(request)


@dataclass(frozen=True, slots=True)
class Bench:
    """Models, texts and time of a part.

    Attributes:
        model: The user's model.
        made: File that apps load in its place; the model itself if there is none.
        config: Configuration of the user.
        texts: Texts that chose nothing.
        seconds: Time for the part, which takes more if that gives no interval.
        ends: Time at which the time for all parts is up.
        began: Time when the part began.
    """

    model: Path
    made: Path
    config: Config
    texts: tuple[bytes, ...]
    seconds: float
    ends: float = math.inf
    began: float = field(default_factory=time.monotonic)

    @property
    def n_ctx(self) -> int:
        """Context length of every engine."""
        return min(trained_context(self.model) or _MOST_CTX, _MOST_CTX)

    @property
    def left_s(self) -> float:
        """Seconds that are left."""
        return self.seconds - (time.monotonic() - self.began)

    def check_time(self) -> None:
        """Check that something may still be measured.

        Raises:
            TimeIsUpError: The time for all parts is up.
        """
        if time.monotonic() >= self.ends:
            raise TimeIsUpError("the time is up.")

    @contextmanager
    def vanilla(self, model: Path | None = None) -> Iterator[Engine]:
        """Open the file that apps load, or another model, with stock llama.cpp."""
        with self._engine("vanilla", Side(model or self.made, self.n_ctx, None)) as engine:
            yield engine

    @contextmanager
    def with_plugins(self, *names: str, **changed: object) -> Iterator[Engine]:
        """Open the file that apps load with some of the configured plugins.

        Args:
            names: Names of the plugins.
            changed: Settings of the first plugin that are changed.
        """
        tables = {name: replace(self.config.plugins[name], enabled=True) for name in names}
        tables[names[0]] = _changed(tables[names[0]], changed)
        config = replace(self.config, on_error="raise", plugins=tables, models={})
        with self._engine(" and ".join(names), Side(self.made, self.n_ctx, config)) as engine:
            yield engine

    @contextmanager
    def as_configured(self, tables: dict[str, PluginTable]) -> Iterator[Engine]:
        """Open the user's model as an app would, with the given plugins."""
        config = replace(self.config, on_error="raise", plugins=tables)
        with self._engine("the configuration", Side(self.model, self.n_ctx, config)) as engine:
            yield engine

    def lengths(
        self, engine: Engine, cost: float, choice: Sequence[tuple[int, int]] = _LENGTHS
    ) -> Lengths:
        """Return the longest requests of which enough fit into the time.

        Args:
            engine: Engine that is timed.
            cost: Time of a round, in requests of this engine.
            choice: Tokens of a prompt and of its answer, the longest ones first.
        """
        tokens = self._tokens(engine)
        probe = Led(tokens[:_N_PROBE], tokens[_N_PROBE : _N_PROBE + _N_ANSWER])
        for _ in range(2):  # the first one touches the weights
            found = engine.follow(probe)
        read_s = found.first_s / _N_PROBE
        left_s = _PLANNED * self.left_s / (cost * LEAST_ROUNDS)
        fits = [
            Lengths(n, m)
            for n, m in choice
            if n + 2 * m <= self.n_ctx and len(tokens) >= LEAST_ROUNDS * (n + m)
        ]
        if not fits:
            raise ConfigError(
                f"the text has {len(tokens):,} tokens, expected {LEAST_ROUNDS * 40} or more: give "
                "a longer one with --text."
            )
        return next((one for one in fits if _seconds(one, read_s, found) <= left_s), fits[-1])

    def pieces(self, engine: Engine, lengths: Lengths, n: int = MOST_ROUNDS) -> list[Piece]:
        """Cut up to ``n`` pieces from all over the texts."""
        tokens, start = self._tokens(engine), engine.tokens(b"", has_start=True)
        length = sum(lengths)
        places = range(0, len(tokens) - length + 1, length)
        places = places[:: max(1, len(places) // n)][:n]
        parts = [tokens[at : at + length] for at in places]
        cut = lengths.n_prompt - len(start)
        return [Piece([*start, *part[:cut]], part[cut : cut + lengths.n_answer]) for part in parts]

    def rounds(self, pieces: Sequence[Piece]) -> Iterator[tuple[int, Piece]]:
        """Yield numbered pieces until the part's time is over, but as many as give an interval."""
        for i, piece in enumerate(pieces):
            if i >= LEAST_ROUNDS and self.left_s <= 0:
                return
            yield i, piece

    @contextmanager
    def _engine(self, name: str, side: Side) -> Iterator[Engine]:
        self.check_time()
        with worker_process(f"{self.made.name} with {name}", serve, side, _THEN) as process:
            process.receive()
            yield Engine(process, self.check_time)

    def _tokens(self, engine: Engine) -> list[int]:
        return [token for text in self.texts for token in engine.tokens(text)]


def in_turn(i: int, vanilla: tuple[Engine, Led], feature: tuple[Engine, Led]) -> Pair:
    """Make a request on both sides; the feature goes first in every other round."""
    (one, led), (other, others) = vanilla, feature
    if i % 2:
        last = other.follow(others)
        return Pair(one.follow(led), last)
    return Pair(one.follow(led), other.follow(others))


# -- inside --------------------------------------------------------------------------------------


def _changed(table: PluginTable, values: dict[str, object]) -> PluginTable:
    origins = {**table.origins, **dict.fromkeys(values, "tune")}
    return replace(table, values={**table.values, **values}, origins=origins)


def _seconds(lengths: Lengths, read_s: float, probe: Followed) -> float:
    return lengths.n_prompt * read_s + lengths.n_answer * probe.token_s

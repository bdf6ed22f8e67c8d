"""Study of contexts after the codec, for every text and every arm."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from llmaas_eval.tolerance.coded import MAX_BITS, Coded
from llmaas_eval.tolerance.engine import Engine, Prefilled
from llmaas_eval.tolerance.outcome import compare, surprise
from llmaas_eval.tolerance.recall import Recall
from llmaas_eval.tolerance.rivals import RIVALS, Case
from llmaas_eval.tolerance.texts import CHUNK, Sample
from llmaas_plugins.kv_chunks.compression.tolerance import densities

__all__ = ["Arm", "Row", "ask", "go_on", "layer_damage"]

Row = dict[str, Any]
"""Result for one text and one arm, as plain JSON values."""


@dataclass(frozen=True, slots=True)
class Arm:
    """A way to store a context.

    Attributes:
        rival: Name in ``RIVALS``, or ``int8`` for the static codec.
        mean: Mean bits of a value.
        levels: Bits to choose from; ``static`` and ``int8`` ignore them.
    """

    rival: str
    mean: float = MAX_BITS
    levels: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """Name of the arm in tables."""
        levels = "any" if len(self.levels) == MAX_BITS else "/".join(map(str, self.levels))
        return f"{self.rival} {levels}".strip()


class _Kept(NamedTuple):
    bits: float
    n_bytes: int
    blob: NDArray[np.uint8]


def go_on(
    engine: Engine,
    samples: Sequence[Sample],
    arms: Sequence[Arm],
    damage: NDArray[np.float64] | None = None,
) -> list[Row]:
    """Evaluate each text's rest after its context was stored in each way, and compare.

    The ``layers`` rival needs ``damage``.
    """
    rows = []
    for number, sample in enumerate(tqdm(samples, unit="text", mininterval=2)):
        prefilled, coded = _prefill(engine, sample.context)
        exact = engine.go_on(prefilled.blob, sample.rest[:-1])
        for arm in arms:
            kept = _keep(arm, coded, prefilled, damage, number)
            found = engine.go_on(kept.blob, sample.rest[:-1])
            row = _row(arm, kept, coded) | {"task": sample.task, "text": number}
            row["exact_surprise"] = surprise(exact, sample.rest)
            rows.append(row | asdict(compare(exact, found, sample.rest)))
    return rows


def ask(
    engine: Engine,
    recalls: Sequence[Recall],
    arms: Sequence[Arm],
    damage: NDArray[np.float64] | None = None,
) -> list[Row]:
    """Ask each context's questions with its original cells, then after each way to store it."""
    rows = []
    for number, recall in enumerate(tqdm(recalls, unit="context", mininterval=2)):
        tokens = engine.tokens(recall.context)
        prefilled, coded = _prefill(engine, tokens[len(tokens) % CHUNK :])
        raw = _Kept(16.0, coded.raw_bytes, prefilled.blob)
        kept = [(Arm("f16", 16.0), raw)]
        kept += [(arm, _keep(arm, coded, prefilled, damage, number)) for arm in arms]
        for arm, way in kept:
            answers = [_answer(engine, way.blob, *question) for question in recall.questions]
            right, nats = np.mean(answers, axis=0).tolist()
            row = _row(arm, way, coded) | {"task": "recall", "text": number}
            rows.append(row | {"right": right, "nats": nats})
    return rows


def _answer(
    engine: Engine, blob: NDArray[np.uint8], prompt: str, answer: str
) -> tuple[bool, float]:
    """Return whether the most likely tokens after ``prompt`` are the answer, and its nats.

    The nats are the surprise of the whole answer. Its full stop and line end do not count.
    """
    n_prompt, tokens = len(engine.tokens(prompt)), engine.tokens(prompt + answer)[:-2]
    log_p = engine.go_on(blob, tokens[:-1]).log_p[n_prompt - 1 :]
    rest = tokens[n_prompt:]
    is_right = bool((log_p.argmax(axis=1) == rest).all())
    return is_right, -float(log_p[np.arange(len(rest)), rest].sum())


def layer_damage(engine: Engine, samples: Iterable[Sample]) -> NDArray[np.float64]:
    """Return the mean divergence with one layer at few bits and the others at ``MAX_BITS``.

    Returns:
        Divergence by layer and bits, shape ``(n_layer, 1 + MAX_BITS)``.
    """
    found = []
    for sample in tqdm(list(samples), desc="layers", unit="text", mininterval=2):
        prefilled, coded = _prefill(engine, sample.context)
        exact = engine.go_on(prefilled.blob, sample.rest[:-1])
        damage = np.zeros((coded.n_layer, 1 + MAX_BITS))
        for layer, few in np.ndindex(coded.n_layer, MAX_BITS - 1):
            bits = np.full((coded.n_layer, coded.n_chunks), MAX_BITS)
            bits[layer] = few + 1
            after = engine.go_on(coded.restored(bits), sample.rest[:-1])
            damage[layer, few + 1] = compare(exact, after, sample.rest).kl
        found.append(damage)
    return np.mean(found, axis=0)


def _prefill(engine: Engine, tokens: Sequence[int]) -> tuple[Prefilled, Coded]:
    prefilled = engine.prefill(tokens)
    return prefilled, Coded(prefilled.blob)


def _keep(
    arm: Arm, coded: Coded, prefilled: Prefilled, damage: NDArray[np.float64] | None, number: int
) -> _Kept:
    if arm.rival == "int8":
        blob, n_bytes = coded.int8()
        return _Kept(MAX_BITS, n_bytes, blob)
    sums = (part.reshape(-1, CHUNK).sum(axis=1) for part in (prefilled.attention, prefilled.seen))
    case = Case(densities(*sums), arm.levels, arm.mean, damage, np.random.default_rng(number))
    bits = RIVALS[arm.rival](case)
    return _Kept(float(np.mean(bits)), coded.n_bytes(bits), coded.restored(bits))


def _row(arm: Arm, kept: _Kept, coded: Coded) -> Row:
    return {
        "arm": arm.name,
        "mean": arm.mean,
        "bits": kept.bits,
        "bytes": kept.n_bytes,
        "share": kept.n_bytes / coded.raw_bytes,
    }

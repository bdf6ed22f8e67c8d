"""Outcomes of each prompt with each share and levels, and what a tiny model tells of the prompt.

Documents are divided into two halves, whose prompts take turns. Each setting of a prompt is
evaluated once (ElastiLM §3.3 evaluates it anew for each promise): a promise only tells which
settings may be used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from llmaas_eval.data import chat_lines
from llmaas_eval.prompts.command import Row
from llmaas_eval.prompts.encoded import Encoded
from llmaas_eval.prompts.engine import Engine
from llmaas_eval.prompts.passages import Passage, conversations, passages
from llmaas_eval.prompts.recalls import PROBES, Layout, as_passage, contexts, mixed
from llmaas_eval.prompts.scorers import Material, Scorer
from llmaas_eval.prompts.words import only_question, shortened, words_of
from llmaas_hooks import Tokens

__all__ = [
    "LONGEST",
    "N_ANSWER",
    "N_HALVES",
    "SIZES",
    "Grid",
    "Half",
    "is_right_by_level",
    "measured",
    "prompts",
]

N_HALVES = 2
LONGEST = 256
"""Most tokens of a prompt and its answer."""
_LENGTHS, N_ANSWER = (64, 112), 4
"""Fewest and most tokens of a conversation's part, and tokens of an answer."""
_LAYOUT = Layout(2, (100, 240), 140)
"""Sizes of conversations before a question about a fact."""
SIZES: Mapping[str, Any] = {"lengths": _LENGTHS, "n_answer": N_ANSWER, "layout": _LAYOUT}
"""All these sizes, on which outcomes depend."""


class Grid(NamedTuple):
    """Settings to evaluate.

    Attributes:
        shares: Shares of a prompt, longest first.
        levels: Levels of prompts, and of answers, widest first.
    """

    shares: Sequence[float]
    levels: Sequence[float]


class Half(NamedTuple):
    """A prompt, and the half of the documents that it is from."""

    half: int
    passage: Passage


def prompts(engine: Engine, data: Path, n: int) -> Iterator[Half]:
    """Yield prompts of both halves in turns: parts of conversations and questions about facts."""
    halves = [_prompts(engine, data, n, half) for half in range(N_HALVES)]
    for number in range(n):
        half = number % N_HALVES
        yield Half(half, next(halves[half]))


def measured(engine: Engine, one: Half, grid: Grid, score: Scorer, encoded: Encoded) -> list[Row]:
    """Return a row: whether each setting gives the whole model's answer, and the features."""
    passage = one.passage
    answer = engine.answer(passage.prompt, N_ANSWER)
    prompt = only_question(words_of(engine, passage.prompt), passage.n_question)
    scores = score(prompt, Material(engine, answer))
    is_right = []
    for share in grid.shares:
        tokens = passage.prompt if share == 1 else shortened(prompt, scores, share)
        is_right.append(is_right_by_level(engine, tokens, answer, grid.levels))
    is_right[0][0][0] = True  # even if the sizes of batches decide between two equal tokens
    row = {"half": one.half, "kind": passage.kind, "n_tokens": len(passage.prompt)}
    row["document"] = f"{one.half} {passage.kind} {passage.document}"
    return [row | {"is_right": is_right, "features": encoded.features(prompt, scores)}]


def is_right_by_level(
    engine: Engine, prompt: Tokens, answer: Tokens, levels: Sequence[float]
) -> list[list[bool]]:
    """Return by prefill and decode level whether the answer follows."""
    found = []
    for prefill in levels:
        if int(engine.prefill(prompt, prefill).argmax()) != answer[0]:
            found.append([False] * len(levels))
            continue
        parts = [engine.read(answer[:-1], decode, len(prompt)) for decode in levels]
        found.append([bool((part.argmax(axis=1) == answer[1:]).all()) for part in parts])
    return found


# -- inside --------------------------------------------------------------------------------------


def _prompts(engine: Engine, data: Path, n: int, half: int) -> Iterator[Passage]:
    texts = {kind: some[half::N_HALVES] for kind, some in conversations(data).items()}
    talks = passages(engine, texts, n, _LENGTHS, N_ANSWER)
    chats = chat_lines(data, "sgd_dev")[half::N_HALVES]
    some = (one for one in contexts(engine, chats, n, _LAYOUT) if one.number % N_HALVES == half)
    # the probes take turns: each fact is asked once of each of them, then the next one
    asked = (
        as_passage(one, turn // len(PROBES) % _LAYOUT.n_facts) for turn, one in enumerate(some)
    )
    return mixed(talks, asked, n)

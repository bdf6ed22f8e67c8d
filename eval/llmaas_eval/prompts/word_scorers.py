"""``python -m llmaas_eval.prompts.word_scorers``: which words replace a prompt, at what share?

    python -m llmaas_eval.prompts.word_scorers

Figs 4a, 13a and 18b of ElastiLM, without its tasks: a model of this size solves none of them. Tiny
models of several sizes learn from dialogues with summaries. Each of them and each other scorer
shortens conversations of other sets to several shares. Judged are the predictions of the text that
really follows, and whether the first tokens of the whole model's answer stay the same. Words are
also kept as whole sentences and clauses. A stopped run goes on with the same command.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from llmaas_eval.prompts.command import Row, finish, kept, parse, parser_of
from llmaas_eval.prompts.engine import Engine, LogP, opened
from llmaas_eval.prompts.passages import Passage, conversations, passages
from llmaas_eval.prompts.scorers import Material, scorers_of
from llmaas_eval.prompts.stretches import UNITS, begins_of, by_stretch
from llmaas_eval.prompts.tiny_encoders import (
    ALL_TRAINED,
    DEFAULT,
    SIZES,
    Encoder,
    encoder_of,
    labeled,
)
from llmaas_eval.prompts.words import only_question, shortened, words_of
from llmaas_hooks import Tokens
from llmaas_plugins.short_prompts.encoder.body import body_folder, read_body
from llmaas_plugins.short_prompts.scorer import Prompt
from llmaas_plugins.short_prompts.scorers.encoder import EncoderScorer

__all__ = ["ATTENTION", "BY_WORD", "SHARES", "Shortening", "main", "shortenings"]

SHARES = (0.9, 0.7, 0.5, 0.3)
_OF_SIZES = (0.7, 0.5)
"""Shares at which all sizes of the tiny model are compared."""
BY_WORD, ATTENTION = "words", "attention"
_RIVALS = (ATTENTION, "self_information", "first", "last", "random")
_LENGTHS, _N_REST, _N_ANSWER = (96, 256), 24, 4
"""Fewest and most tokens of a conversation, tokens that follow it, and tokens of an answer."""
_READER = 200e6
"""Weights of the model whose time to the first token a tiny model's time is a share of."""

Scores = NDArray[np.float32]


class Shortening(NamedTuple):
    """A way to shorten a prompt.

    Attributes:
        scorer: Name of the scorer.
        unit: ``BY_WORD``, or the stretches that are kept as wholes.
        share: Share of the time to the first token; without the tiny model's time, that of tokens.
        is_timed: Whether the share of tokens is smaller by the tiny model's time.
        tokens: Share of the tokens.
    """

    scorer: str
    unit: str
    share: float
    is_timed: bool
    tokens: float


def main(argv: Sequence[str] | None = None) -> int:
    """Learn, measure, print the tables and write the output; return the exit status."""
    torch.set_num_threads(1)  # as the engine
    parser = parser_of("word_scorers", __doc__, 300, "conversations")
    add = parser.add_argument
    add("--texts", type=int, default=500, help="dialogues to learn from; %(default)s")
    add("--pictures", type=Path, metavar="FOLDER", help="also write PNG plots to FOLDER")
    args, options = parse(parser, argv)
    body = read_body(body_folder())
    texts = labeled(options.data, args.texts)
    encoders = [encoder_of(size, body, texts, options.out / "kept") for size in SIZES]
    ways = list(shortenings(encoders))
    about = {
        "study": "word_scorers",
        "lengths": _LENGTHS,
        "n": [_N_REST, _N_ANSWER],
        "ways": ways,
        "encoders": [one.path.name for one in encoders],
    }
    with opened(options.model, _LENGTHS[1] + _N_REST) as engine:
        scorers = _scorers(engine, encoders)
        found = passages(engine, conversations(options.data), options.n, _LENGTHS, _N_REST)
        rows = kept(options, about, found, lambda one: list(_measured(engine, one, scorers, ways)))
    sizes = [
        {"scorer": str(one.size), "n_active": one.n_active, "auc": one.auc} for one in encoders
    ]
    if args.pictures:
        from llmaas_eval.prompts.plots import draw_shares

        draw_shares(rows, args.pictures)
    return finish(options, "word_scorers", rows, texts=len(texts), sizes=sizes)


def shortenings(encoders: Sequence[Encoder]) -> Iterator[Shortening]:
    """Yield all ways to shorten a prompt."""
    main_ones = {DEFAULT, ALL_TRAINED}
    for one in encoders:
        name = str(one.size)
        for share in SHARES if one.size in main_ones else _OF_SIZES:
            yield Shortening(name, BY_WORD, share, False, share)
        for share in _OF_SIZES:
            yield Shortening(name, BY_WORD, share, True, share - one.n_active / _READER)
    for name in _RIVALS:
        for share in SHARES:
            yield Shortening(name, BY_WORD, share, False, share)
    for name in (str(DEFAULT), ATTENTION):
        for unit in UNITS:
            for share in SHARES:
                yield Shortening(name, unit, share, False, share)


# -- inside --------------------------------------------------------------------------------------


_Score = Callable[[Prompt, Material], Scores]


def _scorers(engine: Engine, encoders: Sequence[Encoder]) -> Mapping[str, _Score]:
    """Return the function of each scorer by its name."""
    found = dict(scorers_of(engine, _RIVALS))
    for one in encoders:
        found[str(one.size)] = functools.partial(_encoded, EncoderScorer(one.path))
    return found


def _encoded(scorer: EncoderScorer, prompt: Prompt, material: Material) -> Scores:
    return scorer.scores(prompt, material.engine.llama)


def _measured(
    engine: Engine, one: Passage, scorers: Mapping[str, _Score], ways: Sequence[Shortening]
) -> Iterator[Row]:
    expected, answer = engine.followed(one.prompt, one.rest), engine.answer(one.prompt, _N_ANSWER)
    prompt = only_question(words_of(engine, one.prompt), one.n_question)
    material = Material(engine, one.rest)
    scores = {
        (name, BY_WORD): score(prompt, material)
        for name, score in scorers.items()
    }  # fmt: skip
    for unit in UNITS:
        begins = begins_of(prompt, unit, engine.llama)
        for name in {way.scorer for way in ways if way.unit == unit}:
            scores[name, unit] = by_stretch(prompt, scores[name, BY_WORD], begins)
    for way in ways:
        tokens = shortened(prompt, scores[way.scorer, way.unit], way.tokens)
        about = {"kind": one.kind, "number": one.number, "document": f"{one.kind} {one.document}"}
        row = about | way._asdict() | {"kept": len(tokens) / len(one.prompt)}
        yield row | _judged(engine, tokens, one.rest, answer, expected)


def _judged(engine: Engine, tokens: Tokens, rest: Tokens, answer: Tokens, expected: LogP) -> Row:
    """Return how far predictions are from the whole prompt's, and whether the answer stays."""
    found = engine.followed(tokens, rest)
    kl = (np.exp(expected) * (expected - found)).sum(axis=1, dtype=np.float64).mean()
    further = engine.read(answer[:-1], 1.0, len(tokens)).argmax(axis=1)
    is_first = bool(found[0].argmax() == answer[0])
    return {"kl": float(kl), "agrees": is_first and bool((further == answer[1:]).all())}


if __name__ == "__main__":
    sys.exit(main())

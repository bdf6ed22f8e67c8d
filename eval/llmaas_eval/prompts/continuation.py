"""``python -m llmaas_eval.prompts.continuation``: how a shortened prompt changes what follows.

    python -m llmaas_eval.prompts.continuation

Conversations are shortened by each scorer to the same number of tokens. The text that really
follows is read after the whole and after the shortened conversation, and the predictions of its
tokens are compared. A stopped run goes on with the same command.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from llmaas_eval.prompts.command import Row, finish, kept, parse, parser_of
from llmaas_eval.prompts.engine import Engine, opened
from llmaas_eval.prompts.passages import Passage, conversations, passages
from llmaas_eval.prompts.scorers import NAMES, UNTRAINED, Material, Scorer, scorers_of
from llmaas_eval.prompts.shorter import SHARES, WHOLE, shorter
from llmaas_eval.prompts.words import words_of

__all__ = ["main"]

_LENGTHS, _N_REST = (128, 384), 32
"""Fewest and most tokens of a conversation, and tokens that follow it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the tables and write the output; return the exit status."""
    parser = parser_of("continuation", __doc__, 300, "conversations")
    add = parser.add_argument
    add("--scorers", nargs="+", choices=NAMES, default=UNTRAINED, help="default: all but encoder")
    add("--shares", type=float, nargs="+", default=SHARES, help="shares of the tokens to keep")
    args, options = parse(parser, argv)
    arms = {"scorers": args.scorers, "shares": args.shares}
    about = {"study": "continuation", "lengths": _LENGTHS, "n_rest": _N_REST, **arms}
    with opened(options.model, _LENGTHS[1] + _N_REST) as engine:
        texts = conversations(options.data)
        found = passages(engine, texts, options.n, _LENGTHS, _N_REST)
        scorers = scorers_of(engine, args.scorers)
        rows = kept(
            options, about, found, lambda one: list(_measured(engine, one, scorers, args.shares))
        )
    return finish(options, "continuation", rows, **arms)


def _measured(
    engine: Engine, one: Passage, scorers: Mapping[str, Scorer], shares: Sequence[float]
) -> Iterator[Row]:
    expected = engine.followed(one.prompt, one.rest)
    prompt, material = words_of(engine, one.prompt), Material(engine, one.rest)
    for short in shorter(prompt, one.n_question, material, scorers, shares):
        if short.scorer == WHOLE:
            continue
        found = engine.followed(short.tokens, one.rest)
        row = short._asdict() | {"kind": one.kind, "number": one.number}
        del row["tokens"]
        kl = (np.exp(expected) * (expected - found)).sum(axis=1, dtype=np.float64)
        places = np.arange(len(one.rest))
        nats = (expected - found)[places, one.rest].mean(dtype=np.float64)
        yield row | {"kl": float(kl.mean()), "nats": float(nats)}


if __name__ == "__main__":
    sys.exit(main())

"""``python -m llmaas_eval.prompts.facts``: which scorer keeps the facts that a question needs?

    python -m llmaas_eval.prompts.facts --model recall.gguf

Facts are stated in a conversation and asked for at its end, with a copy of the reference model that
``llmaas_eval.tolerance.train_recall`` trained. They are anywhere in it, so that no part of a prompt
is better to keep than another. Each scorer shortens the prompt to the same number of tokens. No
scorer may have been trained on these facts' sentences (``tolerance.recall``). A stopped run goes on
with the same command.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from llmaas_eval.data import chat_lines
from llmaas_eval.prompts.command import Row, finish, kept, parse, parser_of
from llmaas_eval.prompts.engine import Engine, opened
from llmaas_eval.prompts.passages import Passage
from llmaas_eval.prompts.recalls import PROBES, Context, Layout, as_passage, contexts
from llmaas_eval.prompts.scorers import NAMES, UNTRAINED, Material, Scorer, scorers_of
from llmaas_eval.prompts.shorter import SHARES, Shorter, shorter
from llmaas_eval.prompts.words import words_of

__all__ = ["main"]

_N_FACTS, _CHARACTERS, _MOST_BEFORE = 6, (100, 900), 500
"""Number of facts, and characters of distraction among and after them, and before them."""
_LONGEST, _QUESTION = 512, 64
"""Most tokens of a conversation, and room for a question and its answer."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the tables and write the output; return the exit status."""
    parser = parser_of("facts", __doc__, 200, "conversations of each kind of facts")
    add = parser.add_argument
    add("--scorers", nargs="+", choices=NAMES, default=UNTRAINED, help="default: all but encoder")
    add("--shares", type=float, nargs="+", default=SHARES, help="shares of the tokens to keep")
    add("--probes", nargs="+", choices=PROBES, default=PROBES, help="kinds of facts")
    add("--facts", type=int, default=_N_FACTS, help="facts in each conversation; %(default)s")
    args, options = parse(parser, argv)
    arms = {"scorers": args.scorers, "shares": args.shares}
    layout = Layout(args.facts, _CHARACTERS, _LONGEST, _MOST_BEFORE)
    about = {"study": "facts", "layout": layout, "probes": args.probes, **arms}
    with opened(options.model, _LONGEST + _QUESTION) as engine:
        chats = chat_lines(options.data, "sgd_dev")
        found = contexts(engine, chats, options.n, layout, args.probes)
        scorers = scorers_of(engine, args.scorers)
        rows = kept(
            options, about, found, lambda one: list(_measured(engine, one, scorers, args.shares))
        )
    return finish(options, "facts", rows, layout=layout, **arms)


def _measured(
    engine: Engine, context: Context, scorers: Mapping[str, Scorer], shares: Sequence[float]
) -> Iterator[Row]:
    for question in range(len(context.asked)):
        one = as_passage(context, question)
        prompt, material = words_of(engine, one.prompt), Material(engine, one.rest)
        for short in shorter(prompt, one.n_question, material, scorers, shares):
            row = {"probe": context.probe, "context": context.number, "question": question}
            yield row | _answered(engine, one, short)


def _answered(engine: Engine, one: Passage, short: Shorter) -> Row:
    """Return whether the most likely tokens after a shortened prompt are the answer."""
    log_p = engine.prefill(short.tokens)
    if len(one.rest) > 1:
        log_p = np.concatenate([log_p, engine.read(one.rest[:-1], 1.0, len(short.tokens))])
    row = short._asdict() | {"nats": -float(log_p[np.arange(len(one.rest)), one.rest].sum())}
    del row["tokens"]
    return row | {"right": bool((log_p.argmax(axis=1) == one.rest).all())}


if __name__ == "__main__":
    sys.exit(main())

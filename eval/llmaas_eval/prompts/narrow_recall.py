"""``python -m llmaas_eval.prompts.narrow_recall``: do narrow prefills lose facts?

    python -m llmaas_eval.prompts.narrow_recall --model recall.gguf

Facts are stated early in a conversation and asked for at its end, with a copy of the reference
model that ``llmaas_eval.tolerance.train_recall`` trained. The same questions are asked with prompts
that are read at narrow levels. A stopped run goes on with the same command.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

import numpy as np

from llmaas_eval.data import chat_lines
from llmaas_eval.prompts.command import Row, finish, kept, parse, parser_of
from llmaas_eval.prompts.engine import Engine, LogP, opened
from llmaas_eval.prompts.recalls import Asked, Context, Layout, contexts

__all__ = ["main"]

_LEVELS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)
_CHARACTERS, _LONGEST = (100, 1000), 512
"""Range of distraction in characters, and most tokens of a conversation."""
_QUESTION = 64
"""Room for a question and its answer, in tokens."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the tables and write the output; return the exit status."""
    parser = parser_of("narrow_recall", __doc__, 60, "conversations of each kind of facts")
    add = parser.add_argument
    add("--levels", type=float, nargs="+", default=_LEVELS, help="levels; 1 is always measured")
    add("--facts", type=int, default=3, help="facts in each conversation; %(default)s")
    args, options = parse(parser, argv)
    levels = sorted({1.0, *args.levels}, reverse=True)
    layout = Layout(args.facts, _CHARACTERS, _LONGEST)
    about = {"study": "narrow_recall", "levels": levels, "layout": layout}
    with opened(options.model, _LONGEST + _QUESTION) as engine:
        chats = chat_lines(options.data, "sgd_dev")
        found = contexts(engine, chats, options.n, layout)
        rows = kept(options, about, found, lambda one: list(_measured(engine, one, levels)))
    return finish(options, "narrow_recall", rows, levels=levels, layout=layout)


def _measured(engine: Engine, context: Context, levels: Sequence[float]) -> Iterator[Row]:
    for level in levels:
        engine.prefill(context.tokens, level)
        for question, asked in enumerate(context.asked):
            row = {"probe": context.probe, "context": context.number, "question": question}
            row |= {"distance": asked.distance, "level": level}
            answers = _answers(engine, len(context.tokens), asked, level)
            yield from (row | answer for answer in answers)


def _answers(engine: Engine, at: int, asked: Asked, level: float) -> Iterator[Row]:
    """Yield the arms of a level, after a conversation that was read at the level."""
    last = engine.prefill(asked.prompt, level, at)
    yield {"arm": "prompt", **_answer(engine, at, asked, last, 1.0)}
    if level < 1:
        yield {"arm": "all", **_answer(engine, at, asked, last, level)}
        last = engine.prefill(asked.prompt, 1.0, at)
        yield {"arm": "conversation", **_answer(engine, at, asked, last, 1.0)}


def _answer(engine: Engine, at: int, asked: Asked, last: LogP, level: float) -> Row:
    """Return whether the most likely tokens are the answer, and its nats.

    Args:
        engine: Engine that has read the question.
        at: Number of tokens before the question.
        asked: The question.
        last: Log probabilities after the question.
        level: Level at which the answer is read.
    """
    log_p = last
    if len(asked.answer) > 1:
        more = engine.read(asked.answer[:-1], level, at + len(asked.prompt))
        log_p = np.concatenate([last, more])
    is_right = bool((log_p.argmax(axis=1) == asked.answer).all())
    nats = -float(log_p[np.arange(len(asked.answer)), asked.answer].sum())
    return {"right": is_right, "nats": nats}


if __name__ == "__main__":
    sys.exit(main())

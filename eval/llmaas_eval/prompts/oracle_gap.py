"""``python -m llmaas_eval.prompts.oracle_gap``: is one setting enough for all prompts?

    python -m llmaas_eval.prompts.oracle_gap

A setting is a share of the prompt and the levels of prompt and answer. Under limits of latency, the
best constant setting is compared with an oracle that knows the best one of each prompt. Quality is
the agreement with the whole model's first tokens, and their likelihood. A stopped run goes on with
the same command.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from llmaas_eval.data import chat_lines
from llmaas_eval.prompts.command import Row, finish, kept, parse, parser_of
from llmaas_eval.prompts.engine import Engine, LogP, opened
from llmaas_eval.prompts.passages import Passage, conversations, passages
from llmaas_eval.prompts.recalls import Layout, as_passage, contexts, mixed
from llmaas_eval.prompts.scorers import NAMES, Material, Scorer, scorers_of
from llmaas_eval.prompts.words import only_question, shortened, words_of
from llmaas_hooks import Tokens

__all__ = ["main"]

_SHARES = (1.0, 0.7, 0.5, 0.3)
_PREFILLS = (1.0, 0.8, 0.6, 0.4, 0.3, 0.2)
_DECODES = (1.0, 0.8, 0.6, 0.4, 0.2)
_LENGTHS, _N_ANSWER = (96, 192), 4
"""Fewest and most tokens of a conversation's part, and tokens of an answer."""
_LAYOUT, _LONGEST = Layout(3, (100, 500), 256), 320
"""Sizes of conversations before a question about a fact, and most tokens of a prompt."""


class _Grid(NamedTuple):
    """Settings to measure."""

    scorers: Sequence[str]
    shares: Sequence[float]
    prefills: Sequence[float]
    decodes: Sequence[float]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the tables and write the output; return the exit status."""
    parser = parser_of("oracle_gap", __doc__, 300, "prompts")
    add = parser.add_argument
    add("--scorers", nargs="+", choices=NAMES, default=["random", "attention"])
    args, options = parse(parser, argv)
    grid = _Grid(args.scorers, _SHARES, _PREFILLS, _DECODES)
    about = {"study": "oracle_gap", "lengths": _LENGTHS, "layout": _LAYOUT, **grid._asdict()}
    with opened(options.model, _LONGEST) as engine:
        found = _prompts(engine, options.data, options.n)
        scorers = scorers_of(engine, args.scorers)
        rows = kept(options, about, found, lambda one: _measured(engine, one, grid, scorers))
    return finish(options, "oracle_gap", rows, **grid._asdict())


def _prompts(engine: Engine, data: Path, n: int) -> Iterator[Passage]:
    talks = passages(engine, conversations(data), n, _LENGTHS, _N_ANSWER)
    some = contexts(engine, chat_lines(data, "sgd_dev"), n, _LAYOUT)
    asked = (as_passage(one, turn % _LAYOUT.n_facts) for turn, one in enumerate(some))
    return mixed(talks, asked, n)


def _measured(
    engine: Engine, passage: Passage, grid: _Grid, scorers: Mapping[str, Scorer]
) -> list[Row]:
    """Return a row for each scorer, with the quality of each setting."""
    answer = engine.answer(passage.prompt, _N_ANSWER)
    prompt = only_question(words_of(engine, passage.prompt), passage.n_question)
    whole = _settings(engine, passage.prompt, answer, grid)
    rows = []
    for scorer, score in scorers.items():
        scores = score(prompt, Material(engine, answer))
        parts = [
            whole
            if share == 1
            else _settings(engine, shortened(prompt, scores, share), answer, grid)
            for share in grid.shares
        ]
        row = {"kind": passage.kind, "number": passage.number, "scorer": scorer}
        leads, nats = zip(*parts, strict=True)
        rows.append(row | {"n_tokens": len(passage.prompt), "leads": leads, "nats": nats})
    return rows


def _settings(
    engine: Engine, prompt: Tokens, answer: Tokens, grid: _Grid
) -> tuple[list[list[int]], list[list[float]]]:
    """Return, by prefill and decode level, the tokens that agree until one differs, and nats."""
    leads, nats = [], []
    for prefill in grid.prefills:
        first = engine.prefill(prompt, prefill)
        parts = [engine.read(answer[:-1], decode, len(prompt)) for decode in grid.decodes]
        found = [np.concatenate([first, part]) for part in parts]
        leads.append([_lead(log_p, answer) for log_p in found])
        nats.append([_nats(log_p, answer) for log_p in found])
    return leads, nats


def _lead(log_p: LogP, answer: Tokens) -> int:
    return int((log_p.argmax(axis=1) == answer).cumprod().sum())


def _nats(log_p: LogP, answer: Tokens) -> float:
    return -float(log_p[np.arange(len(answer)), answer].sum())


if __name__ == "__main__":
    sys.exit(main())

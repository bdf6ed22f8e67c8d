"""``python -m llmaas_eval.prompts.design``: what does each part of ElastiLM's design give?

    python -m llmaas_eval.prompts.design --encoder encoder.gguf

Figs 4b, 5, 18b (steps) and 18c. The same prompts are evaluated with all parts, and without one of
them: words chosen by the tiny model or at random, levels with and without adapters, units in the
order of their importance or in the model's own. In a second table, shares and levels are in steps
of 5 %, with one level for prompt and answer, as the paper's. Settings are chosen on one half of the
documents and judged on the other. Right means that the first tokens are the whole model's. A
stopped run goes on with the same command.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from llmaas_eval.prompts.command import Options, Row, finish, kept, parse, parser_of
from llmaas_eval.prompts.design_files import in_steps, recovered, unordered
from llmaas_eval.prompts.design_outcomes import (
    FINE,
    LEVELS,
    NO_ORDER,
    NO_RECOVERY,
    NO_SCORES,
    SHARES,
    STEPS,
    WHOLE,
)
from llmaas_eval.prompts.engine import Engine, opened
from llmaas_eval.prompts.gap import costs
from llmaas_eval.prompts.outcome_table import (
    LONGEST,
    N_ANSWER,
    SIZES,
    Grid,
    Half,
    is_right_by_level,
    prompts,
)
from llmaas_eval.prompts.scorers import Material, Scorer, encoder_of, scorers_of
from llmaas_eval.prompts.words import only_question, shortened, words_of
from llmaas_eval.results import load
from llmaas_hooks import Tokens
from llmaas_plugins.model.digest import file_digest
from llmaas_plugins.reference_model import reference_model_path
from llmaas_plugins.short_prompts.scorers.encoder import EncoderScorer

__all__ = ["main"]

_PARTS, _IN_STEPS = Grid(SHARES, LEVELS), Grid(FINE, FINE)
"""Settings with each design, and those in steps of 5 %, with one level for prompt and answer."""


class _Design(NamedTuple):
    """A file, and which words are kept."""

    name: str
    path: Path
    is_random: bool


class _Asked(NamedTuple):
    """A prompt with the whole model's answer."""

    one: Half
    answer: Tokens


def main(argv: Sequence[str] | None = None) -> int:
    """Make files, measure, print the tables and write the output; return the exit status."""
    torch.set_num_threads(1)  # as the engine
    args, options = parse(_parser(), argv)
    encoder = args.encoder or encoder_of(options.model)
    designs = _designs(args, options)
    fine = in_steps(args.source, options.model, FINE, options.out / "in-steps.gguf")
    asked = _asked(options)
    rows: list[Row] = []
    for design in designs:
        with opened(design.path, LONGEST) as engine:
            rows += _rows(options, asked, engine, design, encoder, _PARTS)
    with opened(fine, LONGEST) as engine:
        design = _Design(STEPS, fine, is_random=False)
        some = asked[: args.steps_n]
        rows += _rows(options, some, engine, design, encoder, _IN_STEPS)
    cost = {level: [*one] for level, one in costs(load("elastic-time")).items()}
    if args.pictures and args.steps_n:
        from llmaas_eval.prompts.design_plots import draw_design

        draw_design(rows, cost, args.pictures)
    return finish(options, "design", rows, costs=list(cost.items()), recovered=args.tokens)


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("design", __doc__, 480, "prompts")
    add = parser.add_argument
    add("--source", type=Path, default=reference_model_path(), help="GGUF file of which the model "
        "was prepared; %(default)s")  # fmt: skip
    add("--encoder", type=Path, help="file of the tiny model; default: the one that was trained")
    add("--tokens", type=int, default=65_536, help="tokens to recover a level from; 0 leaves "
        "recovery out; %(default)s")  # fmt: skip
    add("--steps-n", type=int, default=240, help="prompts in steps of 5 %%, 0 for "
        "none; %(default)s")  # fmt: skip
    add("--pictures", type=Path, metavar="FOLDER", help="also write PNG plots to FOLDER")
    return parser


# -- inside --------------------------------------------------------------------------------------


def _designs(args: argparse.Namespace, options: Options) -> Sequence[_Design]:
    """Return all designs; make their files."""
    own = unordered(args.source, options.model, options.out / "unordered.gguf")
    found = [
        _Design(WHOLE, _recovered(options.model, args, options), is_random=False),
        _Design(NO_SCORES, _recovered(options.model, args, options), is_random=True),
        _Design(NO_ORDER, _recovered(own, args, options), is_random=False),
    ]
    if args.tokens:
        found.append(_Design(NO_RECOVERY, options.model, is_random=False))
    return found


def _recovered(path: Path, args: argparse.Namespace, options: Options) -> Path:
    """Return a file with recovered levels; the file itself if none are to be recovered."""
    levels = [level for level in LEVELS if level < 1]
    return recovered(path, levels, args.tokens, options.out) if args.tokens else path


def _asked(options: Options) -> list[_Asked]:
    """Return the prompts with the whole model's answers."""
    about = {"study": "design answers", **SIZES}
    with opened(options.model, LONGEST) as engine:
        some = list(prompts(engine, options.data, options.n))

        def answer(one: Half) -> list[Row]:
            return [{"answer": engine.answer(one.passage.prompt, N_ANSWER).tolist()}]

        rows = kept(options, about, some, answer)
    pairs = zip(some, rows, strict=True)
    return [_Asked(one, np.array(row["answer"], np.int32)) for one, row in pairs]


def _rows(  # noqa: PLR0913, PLR0917  prompts, and how they are evaluated
    options: Options,
    asked: Sequence[_Asked],
    engine: Engine,
    design: _Design,
    encoder: Path,
    grid: Grid,
) -> Iterator[Row]:
    """Yield the outcomes of a design."""
    words = "random" if design.is_random else file_digest(encoder)
    file = file_digest(design.path)
    about = {"study": "design", "file": file, "words": words, "grid": grid, **SIZES}
    score = _scorer(engine, design, encoder)
    is_one_level = grid is _IN_STEPS
    measure = functools.partial(_measured, engine, score, grid, is_one_level=is_one_level)
    found = kept(options, about, asked, measure)
    for number, row in enumerate(found):
        yield row | {"design": design.name, "number": number}


def _scorer(engine: Engine, design: _Design, encoder: Path) -> Scorer:
    if design.is_random:
        return scorers_of(engine, ["random"])["random"]
    scorer = EncoderScorer(encoder)
    return lambda prompt, material: scorer.scores(prompt, material.engine.llama)


def _measured(
    engine: Engine, score: Scorer, grid: Grid, one: _Asked, *, is_one_level: bool
) -> list[Row]:
    """Return a row: whether each setting gives the whole model's answer."""
    half, passage = one.one
    prompt = only_question(words_of(engine, passage.prompt), passage.n_question)
    scores = score(prompt, Material(engine, one.answer))
    right = _of_one_level if is_one_level else is_right_by_level
    is_right = [
        right(engine, shortened(prompt, scores, share), one.answer, grid.levels)
        if share < 1
        else right(engine, passage.prompt, one.answer, grid.levels)
        for share in grid.shares
    ]
    document = f"{half} {passage.kind} {passage.document}"
    row = {"half": half, "kind": passage.kind, "document": document}
    return [row | {"is_right": is_right}]


def _of_one_level(
    engine: Engine, prompt: Tokens, answer: Tokens, levels: Sequence[float]
) -> list[bool]:
    """Return by level of prompt and answer whether the answer follows."""
    return [is_right_by_level(engine, prompt, answer, [level])[0][0] for level in levels]


if __name__ == "__main__":
    sys.exit(main())

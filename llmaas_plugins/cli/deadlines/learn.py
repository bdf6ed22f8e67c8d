"""``llmaas deadlines learn``: how often narrow levels, and parts of prompts, answer as well."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from llmaas_hooks import ConfigError
from llmaas_plugins.cli.deadlines.prompts import check_prompts, prompts_of
from llmaas_plugins.cli.deadlines.shares import (
    add_share_options,
    check_shares,
    scored,
    shortened_prompts,
    shortener,
)
from llmaas_plugins.cli.given_text import add_prompt_text
from llmaas_plugins.cli.interrupts import stoppable
from llmaas_plugins.cli.models import add_model_action, identified, trained_context
from llmaas_plugins.cli.options import at_least
from llmaas_plugins.cli.output import (
    counted,
    duration_text,
    one_line,
    print_report,
    printable,
    progress_bar,
)

if TYPE_CHECKING:
    from llmaas_plugins.deadlines.answering import Comparison
    from llmaas_plugins.deadlines.answers import Answers

__all__ = ["add_learn"]

_N_REQUESTS, _LEAST_REQUESTS, _N_ANSWER = 1000, 256, 8
_MOST_S = 1200.0
"""Longest time for which the default number of requests is kept."""
_THEN = "progress was kept; the same command goes on"


def add_learn(actions: Any) -> None:
    """Register ``learn``."""
    parser = add_model_action(
        actions,
        "learn",
        learn,
        "measure how often narrow levels give the whole model's answers",
        "Compare the answers of all pairs of prefill and decode levels of a prepared model with "
        "the whole model's, and keep the results. With --shares, answers to parts of the prompts "
        "are compared, too. Stop it at any time: the same command goes on.",
        is_prepared=True,
        is_loaded=True,
    )
    add = parser.add_argument
    add(
        "--table",
        choices=("searched", "uniform"),
        help="widths to measure (default: searched, if the model has them)",
    )
    source = parser.add_mutually_exclusive_group()
    add_prompt_text(source)
    source.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE.jsonl",
        help='an app\'s prompts, one a line: {"prompt": "…"}',
    )
    add("--app", help="app whose prompts these are (default: every app without its own)")
    add(
        "--requests",
        type=at_least(1),
        metavar="N",
        help=f"most prompts to use (default {_N_REQUESTS:,}, or fewer if this would take more than "
        f"{duration_text(_MOST_S)}, but at least {_LEAST_REQUESTS})",
    )
    add(
        "--answer-tokens",
        type=at_least(1),
        default=_N_ANSWER,
        metavar="N",
        help="tokens of an answer to compare (default %(default)s)",
    )
    add_share_options(add)
    add("--json", action="store_true", help="print JSON")


def learn(args: argparse.Namespace) -> int:
    """Compare a prepared model's answers, print their agreement, and keep it."""
    _check(args)
    with stoppable(_THEN), _opened(args) as opened:
        answers, path = _measured(args, opened)
        print_report(args, _report(answers, path), _text(args, answers))
    if not args.json:
        print(f"kept in {path}")
    return 0


# -- internals -----------------------------------------------------------------------------------


class _Opened(NamedTuple):
    """Prepared model that is loaded with its levels.

    Attributes:
        model: The model; with shares, a ``Llama``.
        levels: Levels, widest first.
        levels_id: Name of what the levels compute.
        short_prompts: The plugin that chooses the words of shares; None without shares.
    """

    model: Any
    levels: tuple[float, ...]
    levels_id: str
    short_prompts: Any


def _check(args: argparse.Namespace) -> None:
    from llmaas_plugins.deadlines.answers import MOST_ANSWER, MOST_REQUESTS

    if args.app is not None and args.prompts is None and args.text is None:
        raise ConfigError("--app needs the app's prompts: --prompts FILE.jsonl, or --text FILE.")
    if args.answer_tokens > MOST_ANSWER:
        raise ConfigError(
            f"--answer-tokens is {args.answer_tokens}, expected at most {MOST_ANSWER}."
        )
    if args.requests is not None and args.requests > MOST_REQUESTS:
        raise ConfigError(f"--requests is {args.requests:,}, expected at most {MOST_REQUESTS:,}.")
    check_shares(args)


@contextlib.contextmanager
def _opened(args: argparse.Namespace) -> Iterator[_Opened]:
    """Load a prepared model with its levels.

    Raises:
        ConfigError: The model has no levels, or lacks this table, or llama.cpp cannot load it.
    """
    from llmaas_plugins.activation import activate
    from llmaas_plugins.elastic.level_identity import levels_id
    from llmaas_plugins.elastic.metadata import read_elastic
    from llmaas_plugins.model.loading import loaded

    if read_elastic(args.model) is None:
        raise ConfigError(
            f"{args.model} has no levels; `llmaas elastic prepare {args.model}` writes a file that "
            "has."
        )
    digest = identified(args.model)
    shorter = shortener(args)
    plugins = {"elastic": {"table": args.table}, **shorter}
    with (
        activate({"on_error": "raise", "plugins": plugins}) as suite,
        (scored if args.shares else loaded)(args.model) as opened,
    ):
        (model,) = suite.plugin("elastic").llmaas_status()["models"].values()
        chooser = suite.plugin("short_prompts") if shorter else None
        yield _Opened(opened, tuple(model["levels"]), levels_id(digest, model["key"]), chooser)


def _measured(args: argparse.Namespace, opened: _Opened) -> tuple[Answers, Path]:
    """Return the answers, and the path at which they were kept."""
    from llmaas_plugins.deadlines.answering import Comparison, Prompts
    from llmaas_plugins.deadlines.answers import answers_path
    from llmaas_plugins.deadlines.learning import measured
    from llmaas_plugins.elastic import level
    from llmaas_plugins.elastic.checkpoint import Checkpoint, checkpoint_path, fingerprint_of
    from llmaas_plugins.files.file_bytes import as_store_error

    path = answers_path(opened.levels_id, args.app)
    with as_store_error(f"cannot write {path}"):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    prompts = prompts_of(args, opened.model, args.requests or _N_REQUESTS)
    check_prompts(prompts, args.answer_tokens, trained_context(args.model))
    comparison = Comparison(
        args.answer_tokens, opened.levels, level, args.shares, opened.levels if args.shares else ()
    )
    comparison, n = _announced(args, opened, prompts, comparison)
    prompts = prompts[:n]
    scorer, shorter = "", list[Any]()
    if args.shares:
        scorer, shorter = shortened_prompts(
            args.shares, opened.short_prompts, opened.model, prompts
        )
    about = {
        "levels": opened.levels_id,
        "answer": args.answer_tokens,
        "prompts": [[prompt.tolist() for prompt in some] for some in (prompts, *shorter)],
    }
    with (
        Checkpoint(checkpoint_path(path), fingerprint_of(about)) as kept,
        progress_bar("comparing", "prompt", len(prompts)) as bar,
    ):
        given = Prompts(prompts, shorter)
        answers = measured(opened.model.model, given, comparison, kept, bar.update)
        answers.by(scorer).save(path, opened.levels_id)
    return answers, path


def _announced(
    args: argparse.Namespace, opened: _Opened, prompts: list[Any], comparison: Comparison
) -> tuple[Comparison, int]:
    """Say how long the prompts will take; return what to compare, and how many prompts to use."""
    from llmaas_plugins.deadlines.learning import affordable

    comparison, each_s = affordable(opened.model.model, prompts, comparison, _MOST_S)
    n = len(prompts)
    if args.requests is None and n * each_s > _MOST_S:
        n = min(n, max(int(_MOST_S / each_s), _LEAST_REQUESTS))
        n = 1 << (n.bit_length() - 1)  # the same number after a stop, though speeds vary
    print(
        f"comparing answers to {counted(n, 'prompt')} takes about {duration_text(n * each_s)}",
        file=sys.stderr,
    )
    if len(comparison.levels_of_shares) < len(args.shares and opened.levels):
        some = ", ".join(map(str, comparison.levels_of_shares))
        print(f"parts of prompts are read at the levels {some} only, to save time", file=sys.stderr)
    return comparison, n


# -- report --------------------------------------------------------------------------------------


def _report(answers: Answers, path: Path) -> dict[str, Any]:
    report = {
        "path": str(path),
        "requests": len(answers),
        "prompt_tokens": int(answers.n_prompt.sum()),
        "answer_tokens": answers.n_answer,
        "levels": list(answers.levels),
        "agreement": _agreement(answers, answers.leads),
    }
    if (shorter := answers.shorter) is None:
        return report
    agreement = {
        str(share): _agreement(answers, shorter.leads[:, i])
        for i, share in enumerate(shorter.shares)
    }
    return report | {"shorter": {"levels": list(shorter.levels), "agreement": agreement}}


def _agreement(answers: Answers, leads: Any) -> dict[str, Any]:
    """Return the shares of equal answers by the number of tokens that count."""
    numbers = range(1, answers.n_answer + 1)
    return {str(n): (leads >= n).mean(axis=0).round(4).tolist() for n in numbers}


def _text(args: argparse.Namespace, answers: Answers) -> Iterator[str]:
    app = "" if args.app is None else f" of the app {one_line(args.app)}"
    n = counted(len(answers), "answer")
    yield (
        f"{printable(args.model.name)}: share of {n}{app} whose first "
        f"{counted(answers.n_answer, 'token')} equal the whole model's, in %"
    )
    yield from _grid(answers.levels, answers.leads >= answers.n_answer)
    if (shorter := answers.shorter) is not None:
        for i, share in enumerate(shorter.shares):
            yield f"if {100 * share:g} % of each prompt is read:"
            yield from _grid(shorter.levels, shorter.leads[:, i] >= answers.n_answer)


def _grid(levels: Sequence[float], equal: Any) -> Iterator[str]:
    """Yield the lines of a table by prefill and decode level."""
    yield "prompt   answer at"
    yield "level    " + " ".join(f"{level:5.1f}" for level in levels)
    for level, row in zip(levels, 100 * equal.mean(axis=0), strict=True):
        yield f"{level:5.1f}    " + " ".join(f"{share:5.1f}" for share in row)

"""``llmaas demo``: a day of six apps in one memory, by vanilla llama.cpp and by the plugins."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from llmaas_plugins.cli.files import check_target
from llmaas_plugins.cli.models import check_file
from llmaas_plugins.cli.options import add_config_option, at_least, positive
from llmaas_plugins.cli.switching import add_switching
from llmaas_plugins.machine import usable_processors

__all__ = ["add_parser"]


def add_parser(subparsers: Any) -> None:
    """Register the sub-command."""
    parser = subparsers.add_parser(
        "demo",
        help="show what the plugins do together, on a day of six apps",
        description="Replay a day of six apps, most of which were promised a latency. Each system "
        "has the same memory for weights and contexts: vanilla llama.cpp, each feature alone, and "
        "all together. `llmaas demo switching` compares only the switching of contexts.",
    )
    parser.set_defaults(func=demo)
    actions = parser.add_subparsers(metavar="switching", required=False)
    add_switching(actions)
    add = parser.add_argument
    add(
        "--model",
        type=Path,
        help="GGUF file, best one that `llmaas setup` prepared (default: packaged reference model, "
        "which is prepared first)",
    )
    add_config_option(parser)
    add(
        "--data",
        type=Path,
        help="chats for the day, which the datastore has not seen: OpenAI-style JSONL or ChatGPT's "
        "conversations.json (default: packaged conversations)",
    )
    add("--calls", type=at_least(1), help="most calls (default: as many as fit into the time)")
    add("--tokens", type=at_least(1), default=24, help="most tokens of a reply (default 24)")
    add(
        "--memory",
        type=positive,
        default=0.6,
        metavar="SHARE",
        help="memory, as a share of the bytes of the model and all contexts (default 0.6)",
    )
    add("--minutes", type=positive, default=0.9, metavar="N",
        help="minutes for everything (default %(default)g); large models take longer")  # fmt: skip
    add("--threads", type=at_least(1), default=usable_processors(),
        help="CPU threads (default: %(default)s, all of them)")  # fmt: skip
    add("--seed", type=at_least(0), default=0, help="random seed of the calls' order (default 0)")
    add("--json", type=Path, metavar="FILE", help="write all measurements; - writes to stdout")
    add("--plot", type=Path, metavar="FILE", help="write a picture, as SVG")


def demo(args: argparse.Namespace) -> int:
    """Run the demo and print its table."""
    from llmaas_plugins.cli.day.figures import as_json, figures_of
    from llmaas_plugins.cli.day.picture import picture
    from llmaas_plugins.cli.day.run import Options, run_day
    from llmaas_plugins.cli.day.table import bars, conclusions, table

    to_stdout = args.json is not None and str(args.json) == "-"
    _check(args, to_stdout=to_stdout)
    options = Options(
        model=args.model,
        config=args.config,
        data=args.data,
        n_calls=args.calls,
        n_new=args.tokens,
        share=args.memory,
        minutes=args.minutes,
        seed=args.seed,
        threads=args.threads,
    )
    day = run_day(options, _say)
    found = figures_of(day)
    lines = [*table(found), "", *bars(found), "", *conclusions(day, found)]
    print("\n".join(lines), file=sys.stderr if to_stdout else sys.stdout)
    if to_stdout:
        print(json.dumps(as_json(day, found), indent=2))
    elif args.json is not None:
        args.json.write_text(json.dumps(as_json(day, found), indent=2) + "\n", encoding="utf-8")
    if args.plot is not None:
        title = f"{day.n_contexts} apps, {len(day.calls)} calls, {day.files.model.name}"
        args.plot.write_text(picture(found, title), encoding="utf-8")
    return 0


# -- inside --------------------------------------------------------------------------------------


def _check(args: argparse.Namespace, *, to_stdout: bool) -> None:
    if args.model is not None:
        check_file(args.model)
    if args.json is not None and not to_stdout:
        check_target(args.json, "--json")
    if args.plot is not None:
        check_target(args.plot, "--plot")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)

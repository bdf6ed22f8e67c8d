"""``llmaas demo switching``: contexts switched in three vanilla ways and with kv_chunks."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from llmaas_hooks import ConfigError
from llmaas_plugins.cli.files import check_target
from llmaas_plugins.cli.models import check_file
from llmaas_plugins.cli.options import at_least, positive

__all__ = ["add_switching"]

_LEAST_PROMPT = 64


def add_switching(actions: Any) -> None:
    """Register the action."""
    parser = actions.add_parser(
        "switching",
        help="compare context switching with three vanilla ways, on real conversations",
        description="Replay a day of a device: six apps keep growing contexts on one engine, and "
        "are called in a Markov-switched trace. RAM holds a quarter of their KV by default.",
    )
    parser.add_argument("--model", type=Path, help="GGUF file (default: packaged reference model)")
    parser.add_argument(
        "--data", type=Path, help="your chats: OpenAI-style JSONL or ChatGPT's conversations.json"
    )
    parser.add_argument(
        "--contexts", type=at_least(2), default=12, help="most contexts (default 12)"
    )
    parser.add_argument("--calls", type=at_least(1), help="most calls (default: every user turn)")
    parser.add_argument(
        "--tokens", type=at_least(1), default=24, help="tokens in each reply (default 24)"
    )
    parser.add_argument(
        "--n-ctx",
        type=at_least(0),
        default=1024,
        help="context length in tokens (default 1024); 0 takes the model's own",
    )
    parser.add_argument(
        "--budget-share",
        type=positive,
        default=0.25,
        help="RAM for stored contexts as a share of all contexts' KV (default 0.25)",
    )
    parser.add_argument(
        "--codec",
        choices=("tolerance", "int8", "lossless"),
        default="tolerance",
        help="how our system stores contexts (default tolerance)",
    )
    parser.add_argument(
        "--threads", type=at_least(1), help="CPU threads (default: llama.cpp's choice)"
    )
    parser.add_argument(
        "--seed", type=at_least(0), default=0, help="random seed of the trace (default 0)"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write all measurements; - writes to stdout"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write a PNG (needs matplotlib)")
    parser.set_defaults(func=switching)


def switching(args: argparse.Namespace) -> int:
    """Run the comparison and print its table."""
    from llmaas_plugins.demo.report import as_json, as_table, as_texts, save_plot
    from llmaas_plugins.demo.run import DemoOptions, run_demo
    from llmaas_plugins.reference_model import reference_model_path

    if args.model is not None:
        check_file(args.model)
    if 0 < args.n_ctx < args.tokens + _LEAST_PROMPT:
        raise ConfigError(
            f"--n-ctx is {args.n_ctx}, expected {args.tokens + _LEAST_PROMPT} or more for replies "
            f"of {args.tokens} tokens, or 0 for the model's own."
        )
    to_stdout = args.json is not None and str(args.json) == "-"
    if args.json is not None and not to_stdout:
        check_target(args.json, "--json")
    if args.plot is not None:
        check_target(args.plot, "--plot")
    run = run_demo(
        DemoOptions(
            model=args.model or reference_model_path(),
            data=args.data,
            n_contexts=args.contexts,
            n_calls=args.calls,
            n_new=args.tokens,
            n_ctx=args.n_ctx,
            budget_share=args.budget_share,
            codec=args.codec,
            seed=args.seed,
            threads=args.threads,
        )
    )
    text = sys.stderr if to_stdout else sys.stdout
    print(as_texts(run), as_table(run), sep="\n\n", file=text)
    if to_stdout:
        json.dump(as_json(run), sys.stdout, indent=2)
    elif args.json is not None:
        args.json.write_text(json.dumps(as_json(run), indent=2) + "\n")
    if args.plot is not None:
        save_plot(run, args.plot)
    return 0

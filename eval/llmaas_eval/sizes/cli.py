"""``python -m llmaas_eval.sizes``: random models of the sizes that people run.

    python -m llmaas_eval.sizes make llama-3-8b --type Q4_K_M -o llama.gguf

    python -m llmaas_eval.sizes run llama.gguf --folder work --json llama.json

``make`` writes a model with random weights in the types that llama.cpp's quantizer chooses. The
vocabulary is a real one, from the sdist of llama-cpp-python, and is kept in the output's folder.

``run`` runs every feature on a model, each in a process of its own with limits of time and memory,
and prints what works, what is refused and why, and what each took. The same command goes on where
it was stopped, and tries again what failed. The disk needs room for the model and one file made of
it.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from llmaas_hooks import LlmaasError

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 0, or 2 if it failed."""
    parser = argparse.ArgumentParser(
        "python -m llmaas_eval.sizes",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    _add_make(actions.add_parser("make", help="write a random model"))
    _add_run(actions.add_parser("run", help="run every feature on a model"))
    args = parser.parse_args(argv)
    try:
        return int(args.action(args))
    except LlmaasError as error:
        sys.stderr.write(f"sizes: error: {error}\n")
        return 2


def _add_make(parser: argparse.ArgumentParser) -> None:
    from llmaas_eval.sizes.activity import ACTIVITIES
    from llmaas_eval.sizes.mixture import FILE_TYPES
    from llmaas_eval.sizes.shapes import SHAPES
    from llmaas_plugins.cli.options import at_least

    add = parser.add_argument
    add("shape", choices=SHAPES, metavar="SHAPE", help=f"one of {', '.join(SHAPES)}")
    add("-o", "--output", type=Path, required=True, metavar="FILE", help="file to write")
    add("--type", choices=FILE_TYPES, default="Q4_K_M", help="file type; default %(default)s")
    add("--activity", choices=ACTIVITIES, default="reference",
        help="statistics of channels, heads and neurons; default %(default)s")  # fmt: skip
    add("--shrink", type=int, choices=(1, 2, 4), default=1, metavar="N",
        help="divide all widths by 1, 2 or 4; default %(default)s")  # fmt: skip
    add("--layers", type=at_least(1), metavar="N", help="most layers; default all")
    add("--sdist", type=Path, help="llama-cpp-python's sdist; by default, pip downloads it")
    add("--seed", type=int, default=0, help="seed of the weights; default %(default)s")
    parser.set_defaults(action=_make)


def _add_run(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", type=Path, help="GGUF file")
    add("--folder", type=Path, required=True, help="folder for made files and figures")
    add("--only", nargs="+", default=[], metavar="WORD",
        help="only features with these words, and those that they need")  # fmt: skip
    add("--minutes", type=float, default=15.0,
        help="limit of time of each feature; default %(default)g")  # fmt: skip
    add("--memory", type=float, default=16.0,
        help="limit of memory besides mapped files, in GiB; default %(default)g")  # fmt: skip
    add("--json", type=Path, metavar="FILE", help="write the figures to a file")
    parser.set_defaults(action=_run)


def _run(args: argparse.Namespace) -> int:
    from llmaas_eval.sizes.report import TABLES
    from llmaas_eval.sizes.running import run_features
    from llmaas_eval.sizes.watching import Limits
    from llmaas_plugins.model.gguf_header import read_header
    from llmaas_plugins.run_record import run_record

    read_header(args.model)  # refuses other files before anything runs
    limits = Limits(60 * args.minutes, int(args.memory * (1 << 30)))
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:  # SIGTERM ends a feature's process, too, as Ctrl-C does
        rows = list(run_features(args.model, args.folder, limits, args.only))
    except KeyboardInterrupt:
        sys.stderr.write("sizes: stopped; the same command goes on from here\n")
        return 130
    finally:
        signal.signal(signal.SIGTERM, before)
    document = {"run": run_record(), "model": args.model.stem, "rows": rows}
    sys.stdout.write(f"{TABLES['sizes']([document]).as_markdown()}\n")
    if args.json is not None:
        args.json.write_text(json.dumps(document, indent=1), encoding="utf-8")
    return 0


def _make(args: argparse.Namespace) -> int:
    from llmaas_eval.sizes.activity import ACTIVITIES
    from llmaas_eval.sizes.shapes import SHAPES
    from llmaas_eval.sizes.vocabulary import vocabulary_file
    from llmaas_eval.sizes.writing import plan_model, write_sized
    from llmaas_plugins.cli.files import check_room, check_target
    from llmaas_plugins.cli.output import progress_bar

    path, activity = args.output, ACTIVITIES[args.activity]
    check_target(path, "-o")
    shape = SHAPES[args.shape].shrunk(args.shrink, args.layers)
    vocabulary = vocabulary_file(shape.vocabulary, path.absolute().parent, args.sdist)
    model = plan_model(path.stem, shape, args.type, vocabulary)
    check_room("make", model.n_bytes, path)
    sys.stdout.write(f"{path}: {model.n_bytes / 1e9:.2f} GB\n")
    sys.stdout.writelines(f"{line}\n" for line in (shape.stands_in, activity.source) if line)
    with progress_bar(f"writing {path.name}", "B", model.n_bytes) as bar:
        for n_done in write_sized(path, model, activity, args.seed):
            bar.update(n_done)
    return 0

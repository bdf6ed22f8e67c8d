"""``python -m llmaas_eval.sizes``: random models of the sizes that people run.

    python -m llmaas_eval.sizes make llama-3-8b --type Q4_K_M -o llama.gguf

``make`` writes a model with random weights in the types that llama.cpp's quantizer chooses. The
vocabulary is a real one, from the sdist of llama-cpp-python, and is kept in the output's folder.
"""

from __future__ import annotations

import argparse
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

    add = parser.add_argument
    add("shape", choices=SHAPES, metavar="SHAPE", help=f"one of {', '.join(SHAPES)}")
    add("-o", "--output", type=Path, required=True, metavar="FILE", help="file to write")
    add("--type", choices=FILE_TYPES, default="Q4_K_M", help="file type; default %(default)s")
    add("--activity", choices=ACTIVITIES, default="reference",
        help="statistics of channels, heads and neurons; default %(default)s")  # fmt: skip
    add("--shrink", type=int, choices=(1, 2, 4), default=1, metavar="N",
        help="divide all widths by 1, 2 or 4; default %(default)s")  # fmt: skip
    add("--sdist", type=Path, help="llama-cpp-python's sdist; by default, pip downloads it")
    add("--seed", type=int, default=0, help="seed of the weights; default %(default)s")
    parser.set_defaults(action=_make)


def _make(args: argparse.Namespace) -> int:
    from llmaas_eval.sizes.activity import ACTIVITIES
    from llmaas_eval.sizes.shapes import SHAPES
    from llmaas_eval.sizes.vocabulary import vocabulary_file
    from llmaas_eval.sizes.writing import plan_model, write_sized
    from llmaas_plugins.cli.files import check_room, check_target
    from llmaas_plugins.cli.output import progress_bar

    path, activity = args.output, ACTIVITIES[args.activity]
    check_target(path, "-o")
    shape = SHAPES[args.shape].shrunk(args.shrink)
    vocabulary = vocabulary_file(shape.vocabulary, path.absolute().parent, args.sdist)
    model = plan_model(path.stem, shape, args.type, vocabulary)
    check_room("make", model.n_bytes, path)
    sys.stdout.write(f"{path}: {model.n_bytes / 1e9:.2f} GB\n")
    sys.stdout.writelines(f"{line}\n" for line in (shape.stands_in, activity.source) if line)
    with progress_bar(f"writing {path.name}", "B", model.n_bytes) as bar:
        for n_done in write_sized(path, model, activity, args.seed):
            bar.update(n_done)
    return 0

"""Options that the studies of shorter prompts share, and their way from items to an output."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tqdm import tqdm

from llmaas_eval.data import DATA
from llmaas_eval.elastic.prepared import prepared
from llmaas_eval.measured import measured_once
from llmaas_eval.prompts.report import report
from llmaas_eval.results import write
from llmaas_hooks import LlmaasError
from llmaas_plugins.elastic.metadata import read_elastic
from llmaas_plugins.model.digest import file_digest
from llmaas_plugins.reference_model import reference_model_path

__all__ = ["Options", "Row", "finish", "kept", "parse", "parser_of"]

Row = dict[str, Any]

_Item = TypeVar("_Item")
_N_QUICK = 2


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a study.

    Attributes:
        model: Prepared model.
        data: Folder of the data sets.
        n: Number of items.
        out: Folder for results; what is measured there is not measured again.
    """

    model: Path
    data: Path
    n: int
    out: Path


def parser_of(study: str, description: str | None, n: int, items: str) -> argparse.ArgumentParser:
    """Return a parser of the common options.

    Args:
        study: Name of the study's module.
        description: The module's docstring.
        n: Number of items by default.
        items: Kind of items, in the plural.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m llmaas_eval.prompts.{study}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--model",
        type=Path,
        default=reference_model_path(),
        help="GGUF file; one that is not prepared is prepared with uniform widths; %(default)s",
    )
    add("--data", type=Path, default=DATA, help="folder of the data sets; %(default)s")
    add("-n", type=int, default=n, help=f"number of {items}; %(default)s")
    add("-o", "--out", type=Path, default=Path("build/prompts"), help="folder; %(default)s")
    add("--quick", action="store_true", help=f"{_N_QUICK} {items}, as a check only")
    return parser


def parse(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None
) -> tuple[argparse.Namespace, Options]:
    """Return the arguments and the common options; prepare the model if it is not prepared."""
    args = parser.parse_args(argv)
    (args.out / "kept").mkdir(parents=True, exist_ok=True)
    try:
        is_prepared = read_elastic(args.model) is not None
        model = args.model if is_prepared else prepared(args.model, args.out, is_quick=True)
    except (LlmaasError, OSError, RuntimeError, ValueError) as error:
        parser.error(str(error))
    return args, Options(model, args.data, _N_QUICK if args.quick else args.n, args.out)


def kept(
    options: Options,
    about: Mapping[str, Any],
    items: Iterable[_Item],
    measure: Callable[[_Item], list[Row]],
) -> list[Row]:
    """Return the rows of all items; each item is measured once.

    Args:
        options: Options of the study.
        about: All that the rows depend on, besides the model and an item's number.
        items: Items in the order of their numbers.
        measure: Function that measures an item.
    """
    base = {"model": file_digest(options.model), **about}
    rows: list[Row] = []
    for number, item in enumerate(tqdm(items, unit="item", mininterval=2, disable=None)):
        name = base | {"number": number}
        rows += measured_once(options.out / "kept", name, functools.partial(measure, item))
    return rows


def finish(options: Options, study: str, rows: Sequence[Row], **settings: Any) -> int:
    """Write a study's output and print its report; return the exit status."""
    settings = {"study": study, "model": options.model.name, "n": options.n, **settings}
    text = write(options.out / study, settings, rows, report)
    sys.stdout.write(f"{text}\n")
    return 0

"""``python -m llmaas_eval.recovery``: what recovery wins back, by arm, level and kind of text.

    llmaas elastic prepare model.gguf
    python -m llmaas_eval.recovery --prepared model.elastic.gguf --out recovery

Results and unfinished runs are kept in ``--out``: the same command goes on where it was stopped.
Encyclopedic text and cloud chats are left out, because they are reserved for the last report.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llmaas_eval.data import DATA
from llmaas_eval.learning import (
    has_torch,
    print_document,
    record,
    study_parser,
    texts_by_kind,
    training_text,
)
from llmaas_eval.recovery.report import report
from llmaas_plugins.elastic.metadata import Elastic, read_elastic

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the study and print its tables or JSON; return the exit status."""
    if not has_torch():
        return 2
    parser = _parser()
    args = parser.parse_args(argv)
    elastic = read_elastic(args.prepared)
    if elastic is None:
        parser.error(f"{args.prepared} is not prepared")
    try:
        document = _measured(args, elastic)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    return print_document(args, document, report, "llmaas_eval.recovery.plots")


def _parser() -> argparse.ArgumentParser:
    from llmaas_eval.recovery.arms import ARMS

    parser = study_parser("recovery", __doc__)
    add = parser.add_argument
    add("--prepared", type=Path, required=True, help="output of `llmaas elastic prepare`")
    add("--table", help="table of widths; default: searched, if the file has it")
    add("--data", type=Path, default=DATA, help="folder with the data sets; default %(default)s")
    add("--out", type=Path, required=True, help="folder for results and unfinished runs")
    add("--arms", nargs="+", choices=ARMS, default=[*ARMS], help="default all")
    add("--levels", type=float, nargs="+", help="default all levels below 1")
    add("--tokens", type=int, default=1 << 20, help="tokens a level; default %(default)s")
    add("--rank", type=int, default=8, help="default %(default)s")
    add("--windows", type=int, default=64, help="test windows of 512 tokens; default %(default)s")
    add("--json", action="store_true", help="print JSON instead of tables")
    add("--pictures", type=Path, metavar="FOLDER", help="also write PNG plots to FOLDER")
    add("--quick", action="store_true", help="read a few windows of packaged text, as a check only")
    return parser


def _measured(args: argparse.Namespace, elastic: Elastic) -> dict[str, Any]:
    from llmaas_eval.recovery.study import Material, study
    from llmaas_plugins.training.recovery import Recipe

    table = args.table or ("searched" if "searched" in elastic.tables else "uniform")
    levels = args.levels or [level for level in elastic.levels if level < 1]
    unknown = [level for level in levels if level not in elastic.levels]
    if table in elastic.biases:
        raise ValueError(f"{args.prepared} has biases: prepare it without `--compensate`")
    if table not in elastic.tables or unknown:
        raise ValueError(f"{args.prepared} has no table {table!r}, or no levels {unknown}")
    training, kinds = training_text(args, args.prepared), texts_by_kind(args, args.prepared)
    recipe = Recipe(args.tokens, args.rank)
    rows = study(
        Material(args.prepared, elastic, table, training, kinds, recipe, args.out),
        args.arms,
        levels,
    )
    settings = {
        "table": table,
        "order": elastic.calibration.method,
        "rank": args.rank,
        "n_tokens": args.tokens,
    }
    return record() | settings | {"rows": rows}

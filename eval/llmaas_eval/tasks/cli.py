"""``python -m llmaas_eval.tasks``: accuracy of the sparse mode on tasks, by channel file.

    python -m llmaas_eval.tasks --data DIR --out tasks

It tunes a copy of the packaged model to three tasks, makes channel files for it with the commands
``llmaas flash pack`` and ``llmaas flash distill``, and answers questions that were held out.
Results and unfinished runs are kept in ``--out``: the same command goes on where it was stopped.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from llmaas_eval.data import DATA
from llmaas_eval.learning import has_torch, print_document, record, study_parser
from llmaas_eval.tasks.answering import WAYS
from llmaas_eval.tasks.questions import Task, generated_tasks, read_tasks
from llmaas_eval.tasks.report import report
from llmaas_eval.tasks.study import ARMS, Material, Row, study
from llmaas_plugins.reference_model import reference_model_path

__all__ = ["main"]

_SEED = 0
_QUICK_TUNED, _QUICK_TOKENS, _QUICK_QUESTIONS = 8_192, 2_048, 21


def main(argv: Sequence[str] | None = None) -> int:
    """Run the study and print its table or JSON; return the exit status."""
    if not has_torch():
        return 2
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        rows = _measured(args)
    except (OSError, RuntimeError, ValueError) as error:
        parser.error(str(error))
    document = record() | {"n_tuned": args.tune_tokens, "n_tokens": args.tokens, "rows": rows}
    return print_document(args, document, report, "llmaas_eval.tasks.plots")


def _parser() -> argparse.ArgumentParser:
    parser = study_parser("tasks", __doc__)
    add = parser.add_argument
    add("--model", type=Path, default=reference_model_path(), help="GGUF; default packaged model")
    add("--data", type=Path, default=DATA, help="folder with the data sets; default %(default)s")
    add("--out", type=Path, default=Path("tasks"), help="folder for files and results")
    add("--tune-tokens", type=int, default=786_432, help="tokens to tune on; default %(default)s")
    add("--tokens", type=int, default=131_072, help="tokens to distill on; default %(default)s")
    add("--questions", type=int, default=512, help="most questions a task; default %(default)s")
    add("--arms", nargs="+", choices=ARMS, default=[*ARMS], help="channel files; default all")
    add("--sparse", nargs="+", choices=WAYS, default=[*WAYS], help="sparse tokens; default both")
    add("--threads", type=int, default=1, help="threads to train with; default %(default)s")
    add("--json", action="store_true", help="print JSON instead of the table")
    add("--pictures", type=Path, metavar="FOLDER", help="also write a PNG plot to FOLDER")
    add("--quick", action="store_true", help="train little, on generated requests, as a check only")
    return parser


def _measured(args: argparse.Namespace) -> list[Row]:
    import torch

    from llmaas_eval.tasks.tuning import tune

    torch.set_num_threads(args.threads)
    if args.quick:
        args.tune_tokens, args.tokens = _QUICK_TUNED, _QUICK_TOKENS
    tasks = _tasks(args)
    tuned = tune(args.model, tasks, args.tune_tokens, args.out, _SEED)
    folder = args.out / f"{tuned.stem}-{args.tokens}"
    return study(Material(tuned, tasks, args.tokens, folder, _SEED), args.arms, args.sparse)


def _tasks(args: argparse.Namespace) -> Mapping[str, Task]:
    if args.quick:
        return generated_tasks(_QUICK_QUESTIONS, _SEED)
    return read_tasks(args.data, args.questions, _SEED)

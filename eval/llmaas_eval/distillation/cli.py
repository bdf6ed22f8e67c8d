"""``python -m llmaas_eval.distillation``: what distillation wins back, by arm and sparsity.

    python -m llmaas_eval.distillation --model model.gguf --out distillation

Results and unfinished runs are kept in ``--out``: the same command goes on where it was stopped.
Encyclopedic text and cloud chats are left out, because they are reserved for the last report.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llmaas_eval.data import DATA
from llmaas_eval.distillation.report import report
from llmaas_eval.learning import (
    has_torch,
    print_document,
    record,
    study_parser,
    texts_by_kind,
    training_text,
)
from llmaas_patches.native.packing import model_tensors

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the study and print its tables or JSON; return the exit status."""
    if not has_torch():
        return 2
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        document = record() | _measured(args)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    return print_document(args, document, report)


def _parser() -> argparse.ArgumentParser:
    from llmaas_eval.distillation.study import ARMS

    parser = study_parser("distillation", __doc__)
    add = parser.add_argument
    add("--model", type=Path, required=True, help="a GGUF file")
    add("--data", type=Path, default=DATA, help="folder with the data sets; default %(default)s")
    add(
        "--out",
        type=Path,
        default=Path("distillation"),
        help="folder for results and unfinished runs",
    )
    add("--finished", action="store_true", help="judge the model's own channel file; train nothing")
    add("--arms", nargs="+", choices=ARMS, default=[*ARMS], help="default all")
    add("--tokens", type=int, default=1 << 20, help="tokens an arm; default %(default)s")
    add("--windows", type=int, default=64, help="test windows of 512 tokens; default %(default)s")
    add("--json", action="store_true", help="print JSON instead of tables")
    add("--quick", action="store_true", help="read a few windows of packaged text, as a check only")
    return parser


def _measured(args: argparse.Namespace) -> dict[str, Any]:
    from llmaas_eval.distillation.finished import finished
    from llmaas_eval.distillation.study import USED, Material, study
    from llmaas_plugins.training.distillation import N_PROMPT, SparseRecipe

    kinds = texts_by_kind(args, args.model)
    n_prompt = min(N_PROMPT, next(iter(kinds.values())).shape[1] // 4)
    if args.finished:
        return {"finished": finished(args.model, kinds, USED, n_prompt)}
    training, tensors = training_text(args, args.model), model_tensors(args.model)
    recipe = SparseRecipe(args.tokens, n_prompt=n_prompt)
    rows = study(Material(args.model, tensors, training, kinds, recipe, args.out), args.arms)
    return {"n_tokens": args.tokens, "rows": rows}

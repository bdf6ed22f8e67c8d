"""``python -m llmaas_eval.pareto``: perplexity against memory and time, in one picture.

    python -m llmaas_eval.pareto --data DIR --out pareto

Perplexity is measured with the packaged model, and time with a random model of 200 M weights in the
same types and settings. Files and results are kept in ``--out``: the same command goes on where it
was stopped.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from llmaas_eval.data import (
    DATA,
    TRAINING_TEXT,
    VALIDATION_TEXT,
    packaged_documents,
    read_documents,
)
from llmaas_eval.elastic.texts import windows_of
from llmaas_eval.learning import has_torch, print_document, record, study_parser
from llmaas_eval.models import SHAPE_200M
from llmaas_eval.pareto.cases import Choices
from llmaas_eval.pareto.report import report
from llmaas_plugins.reference_model import reference_model_path

if TYPE_CHECKING:
    from llmaas_eval.pareto.study import Material

__all__ = ["main"]

_N_PROMPT, _N_TOKENS, _N_LEARNING = 64, 512, 16
_CHARACTERS = 6
"""Characters to read for a token: more than usual, so that enough tokens are read."""
_QUICK = Choices(("Q4_0", "Q2_K"), (), (0.5,), (0.5,), with_pruned=False)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the study and print its table or JSON; return the exit status."""
    if not has_torch():
        return 2
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        from llmaas_eval.pareto.study import study

        rows = study(_material(args), _QUICK if args.quick else Choices())
    except (OSError, RuntimeError, ValueError) as error:
        parser.error(str(error))
    document = record() | {"n_tokens": args.tokens, "rows": rows}
    return print_document(args, document, report, "llmaas_eval.pareto.plots")


def _parser() -> argparse.ArgumentParser:
    parser = study_parser("pareto", __doc__)
    add = parser.add_argument
    add("--model", type=Path, default=reference_model_path(), help="GGUF; default packaged model")
    add("--data", type=Path, default=DATA, help="folder with the data sets; default %(default)s")
    add("--out", type=Path, default=Path("pareto"), help="folder for files and results")
    add("--windows", type=int, default=32, help="test windows of 512 tokens; default %(default)s")
    add("--tokens", type=int, default=131_072, help="tokens to distill on; default %(default)s")
    add(
        "--level-tokens",
        type=int,
        default=65_536,
        help="tokens to recover each level on; default %(default)s",
    )
    add("--rounds", type=int, default=40, help="rounds of timing; default %(default)s")
    add("--threads", type=int, default=1, help="threads to train and quantize with; default 1")
    add("--json", action="store_true", help="print JSON instead of the table")
    add("--pictures", type=Path, metavar="FOLDER", help="also write a PNG plot to FOLDER")
    add("--quick", action="store_true", help="learn little and use a small model, as a check only")
    return parser


def _material(args: argparse.Namespace) -> Material:
    import torch

    from llmaas_eval.pareto.files import Learning
    from llmaas_eval.pareto.study import Material

    torch.set_num_threads(args.threads)
    if args.quick:
        args.tokens, args.level_tokens, args.rounds = 2_048, 4_096, 3
    args.out.mkdir(parents=True, exist_ok=True)
    text, learned, windows = _texts(args)
    learning = Learning(text, learned, args.tokens, args.level_tokens, not args.quick, args.data)
    shape = replace(SHAPE_200M, n_layer=1) if args.quick else SHAPE_200M
    n_prompt = min(_N_PROMPT, windows.shape[1] // 4)
    return Material(
        args.model, shape, windows, n_prompt, learning, args.rounds, args.out, args.threads
    )


def _texts(args: argparse.Namespace) -> tuple[Path, NDArray[np.int64], NDArray[np.int64]]:
    """Return the file of the text to learn from, windows of it, and windows to judge by."""
    path = args.out / "text.txt"
    if args.quick:
        documents = packaged_documents()
        path.write_text("\n".join(documents), encoding="utf-8")
        some = windows_of(args.model, documents, 6, 64).astype(np.int64)
        return path, some[:4], some[4:]
    most = max(args.tokens, args.level_tokens, _N_LEARNING * _N_TOKENS)
    documents = read_documents(args.data / TRAINING_TEXT, _CHARACTERS * most)
    path.write_text("\n".join(documents), encoding="utf-8")
    learned = windows_of(args.model, documents, _N_LEARNING, _N_TOKENS)
    held_out = read_documents(args.data / VALIDATION_TEXT)
    windows = windows_of(args.model, held_out, args.windows, _N_TOKENS)
    return path, learned.astype(np.int64), windows.astype(np.int64)

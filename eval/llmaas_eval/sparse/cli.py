"""``python -m llmaas_eval.sparse``: measure sparse decoding's quality and channels' locality."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from llmaas_eval.data import DATA
from llmaas_eval.results import about
from llmaas_eval.sparse.report import report
from llmaas_eval.sparse.study import SparseSettings, study
from llmaas_eval.sparse.texts import read_texts
from llmaas_plugins.reference_model import reference_model_path

__all__ = ["main"]

_N_TOKENS = 512


def main(argv: Sequence[str] | None = None) -> int:
    """Print the study's tables, or the same numbers as JSON."""
    parser = argparse.ArgumentParser(prog="python -m llmaas_eval.sparse", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON in place of tables")
    parser.add_argument(
        "--data", type=Path, default=DATA, help="folder with the data sets; default %(default)s"
    )
    parser.add_argument("--model", type=Path, help="GGUF file; default: the packaged model")
    parser.add_argument(
        "--windows",
        type=int,
        default=8,
        help="windows of 512 tokens for perplexity; default %(default)s",
    )
    parser.add_argument(
        "--contexts",
        type=int,
        default=4,
        help="contexts of 512 tokens from each data set; default %(default)s",
    )
    args = parser.parse_args(argv)
    if find_spec("torch") is None:
        parser.error("torch is not installed: pip install 'llmaas-plugins[train]'")
    model = args.model or reference_model_path()
    try:
        texts = read_texts(args.data, model, args.windows, args.contexts, _N_TOKENS)
    except FileNotFoundError as error:
        parser.error(str(error))
    found = study(model, texts, SparseSettings())
    document = about() | found
    sys.stdout.write(f"{json.dumps(document) if args.json else report(document)}\n")
    return 0

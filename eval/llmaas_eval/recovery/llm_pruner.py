"""``python -m llmaas_eval.recovery.llm_pruner``: order a model's units as LLM-Pruner does.

    llmaas elastic prepare model.gguf
    python -m llmaas_eval.recovery.llm_pruner --model model.gguf --out llm-pruner.gguf
    python -m llmaas_eval.recovery --prepared llm-pruner.gguf --out recovery

The file has the paper's uniform widths and the anchors of the model's own scores, so only the order
differs. LLM-Pruner recovers such a model with adapters and the next token's loss.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from llmaas_eval.data import DATA, TRAINING_TEXT, read_documents
from llmaas_eval.elastic.scores import llm_pruner_scores
from llmaas_eval.elastic.texts import windows_of
from llmaas_eval.learning import has_torch
from llmaas_hooks import ConfigError
from llmaas_plugins.cli.main import main as llmaas
from llmaas_plugins.elastic.scores import read_scores, scores_path, write_scores
from llmaas_plugins.elastic.units import blocks_of

__all__ = ["main"]

_N_WINDOWS, _N_TOKENS = 32, 512
_CHARACTERS = 6 * _N_WINDOWS * _N_TOKENS
"""Characters to read: more than usual for a token, so that enough tokens are read."""


def main(argv: Sequence[str] | None = None) -> int:
    """Write the file; return the exit status."""
    if not has_torch():
        return 2
    parser = argparse.ArgumentParser(
        prog="python -m llmaas_eval.recovery.llm_pruner",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", type=Path, required=True, help="a GGUF file with its scores beside it")
    add("--out", type=Path, required=True, help="file to write")
    add("--data", type=Path, default=DATA, help="folder with the data sets; default %(default)s")
    args = parser.parse_args(argv)
    try:
        own = read_scores(scores_path(args.model), blocks_of(args.model), args.model)
        documents = read_documents(args.data / TRAINING_TEXT, _CHARACTERS)
        windows = windows_of(args.model, documents, _N_WINDOWS, _N_TOKENS)
    except (ConfigError, OSError, ValueError) as error:
        parser.error(str(error))
    scores = replace(llm_pruner_scores(args.model, windows), layers=own.layers)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "scores.npz"
        write_scores(path, scores, args.model)
        options = ["--scores", str(path), "--no-search", "-o", str(args.out)]
        return llmaas(["elastic", "prepare", str(args.model), *options])


if __name__ == "__main__":
    sys.exit(main())

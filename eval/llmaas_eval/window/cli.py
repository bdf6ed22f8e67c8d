"""``python -m llmaas_eval.window``: cost and perplexity of texts longer than the window."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import llama_cpp

from llmaas_eval.data import packaged_chats
from llmaas_eval.results import about
from llmaas_eval.window.report import report
from llmaas_eval.window.study import measure, texts_of
from llmaas_plugins.reference_model import reference_model_path

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print the table; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m llmaas_eval.window", description=__doc__)
    parser.add_argument("--model", type=Path, default=reference_model_path())
    parser.add_argument("--data", type=Path, nargs="+", default=packaged_chats())
    parser.add_argument("--window", type=int, default=256, help="cells of the window")
    parser.add_argument("--tokens", type=int, default=900, help="tokens of each text")
    parser.add_argument("--texts", type=int, default=10, help="most texts taken from a file")
    parser.add_argument("-o", "--output", type=Path, help="JSON file")
    args = parser.parse_args(argv)

    engine: dict[str, Any] = {"n_ctx": 0, "n_threads": 1, "n_threads_batch": 1, "verbose": False}
    with contextlib.closing(llama_cpp.Llama(str(args.model), flash_attn=True, **engine)) as llama:
        try:
            texts = list(texts_of(llama, args.data, args.tokens, args.texts))
            rows = measure(llama, texts, args.window)
        except (ValueError, OSError) as error:
            sys.stderr.write(f"window: error: {error}\n")
            return 2
    found = about() | {
        "window": args.window,
        "tokens": args.tokens,
        "texts": len(texts),
        "rows": [asdict(row) for row in rows],
    }
    sys.stdout.write(f"{report(found)}\n")
    if args.output is not None:
        args.output.write_text(json.dumps(found, indent=1) + "\n")
    return 0

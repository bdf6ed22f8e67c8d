"""Parts that the studies of learning share: recovery and distillation."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from llmaas_eval.data import (
    TRAINING_TEXT,
    documents_by_kind,
    packaged_documents,
    read_documents,
)
from llmaas_eval.elastic.texts import Windows, windows_of
from llmaas_eval.results import about

__all__ = [
    "has_torch",
    "print_document",
    "record",
    "study_parser",
    "texts_by_kind",
    "training_text",
]

_N_TOKENS, _CHARACTERS, _N_QUICK = 512, 6, 4
_KINDS = (
    "the training text's kind", "novels", "news", "service dialogs", "instructions with answers",
)  # fmt: skip


def has_torch() -> bool:
    """Return whether torch is installed; if not, say how to install it."""
    is_found = find_spec("torch") is not None
    if not is_found:
        sys.stderr.write("torch is not installed: pip install 'llmaas-plugins[train]'\n")
    return is_found


def study_parser(module: str, description: str | None) -> argparse.ArgumentParser:
    """Return the parser of ``python -m llmaas_eval.MODULE``, without options."""
    return argparse.ArgumentParser(
        prog=f"python -m llmaas_eval.{module}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def print_document(
    args: argparse.Namespace,
    document: dict[str, Any],
    report: Callable[[dict[str, Any]], str],
    plots: str | None = None,
) -> int:
    """Print a study's output as JSON or as its report, and draw its rows; return the exit status.

    Args:
        args: Options ``json`` and, with ``plots``, ``pictures``: a folder or None.
        document: Output of the study.
        report: Function that makes the report.
        plots: Module whose ``draw`` plots the output's rows; it is imported only for that.
    """
    if plots is not None and args.pictures:
        import_module(plots).draw(document["rows"], args.pictures)
    sys.stdout.write(f"{json.dumps(document) if args.json else report(document)}\n")
    return 0


def record() -> dict[str, Any]:
    """Return the record of this run, with the GPU if one learned."""
    from llmaas_plugins.training.device import device_name, learning_device

    found, device = about(), learning_device()
    if device.type == "cuda":
        found["machine"] += f", {device_name(device)}"
    return found


def training_text(args: argparse.Namespace, model: Path, n_tokens: int = _N_TOKENS) -> Windows:
    """Return windows to learn from.

    Args:
        args: Options ``quick``, ``data`` and ``tokens``.
        model: GGUF file with the vocabulary.
        n_tokens: Tokens of each window.
    """
    if args.quick:
        return _quick(model)[:_N_QUICK]
    documents = read_documents(args.data / TRAINING_TEXT, _CHARACTERS * args.tokens)
    return windows_of(model, documents, args.tokens, n_tokens)


def texts_by_kind(args: argparse.Namespace, model: Path) -> Mapping[str, Windows]:
    """Return windows to judge by, by kind of text.

    Args:
        args: Options ``quick``, ``data`` and ``windows``.
        model: GGUF file with the vocabulary.
    """
    if args.quick:
        return {"packaged chats": _quick(model)[_N_QUICK:]}
    found = documents_by_kind(args.data)
    return {kind: windows_of(model, found[kind], args.windows, _N_TOKENS) for kind in _KINDS}


def _quick(model: Path) -> Windows:
    return windows_of(model, packaged_documents(), 6, 64)

"""Parts that the studies of learning share: recovery and distillation."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
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

__all__ = ["has_torch", "record", "texts_by_kind", "training_text"]

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


def record() -> dict[str, Any]:
    """Return the record of this run, with the GPU if one learned."""
    from llmaas_plugins.training.device import device_name, learning_device

    found, device = about(), learning_device()
    if device.type == "cuda":
        found["machine"] += f", {device_name(device)}"
    return found


def training_text(args: argparse.Namespace, model: Path) -> Windows:
    """Return windows to learn from.

    Args:
        args: Options ``quick``, ``data`` and ``tokens``.
        model: GGUF file with the vocabulary.
    """
    if args.quick:
        return _quick(model)[:_N_QUICK]
    documents = read_documents(args.data / TRAINING_TEXT, _CHARACTERS * args.tokens)
    return windows_of(model, documents, args.tokens, _N_TOKENS)


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

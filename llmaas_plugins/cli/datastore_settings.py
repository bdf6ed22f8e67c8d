"""What ``llmaas.toml`` says about the datastore."""

from __future__ import annotations

import argparse
from pathlib import Path

from llmaas_plugins.cli.store_actions import chosen_directory
from llmaas_plugins.config import load_config

__all__ = ["datastore_directory"]

_DEFAULT = "~/.cache/llmaas/knn"


def datastore_directory(args: argparse.Namespace) -> Path:
    """Where it is: as ``--store`` says, or as configured."""
    return chosen_directory(args, lambda: _configured(args))


def _configured(args: argparse.Namespace) -> Path:
    table = load_config(args.config).plugins.get("knn_lm")
    return Path(table.values.get("store", _DEFAULT) if table else _DEFAULT)

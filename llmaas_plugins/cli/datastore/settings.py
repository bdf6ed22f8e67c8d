"""Settings of the datastore from ``llmaas.toml``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from llmaas_plugins.cli.store_actions import chosen_directory, settings_of

if TYPE_CHECKING:
    from llmaas_plugins.knn_lm.config import KnnLMConfig

__all__ = ["datastore_directory", "datastore_settings"]


def datastore_settings(args: argparse.Namespace) -> KnnLMConfig:
    """Return the settings of the plugin ``knn_lm``."""
    from llmaas_plugins.knn_lm.config import KnnLMConfig

    settings = settings_of(args, "knn_lm", KnnLMConfig)
    assert isinstance(settings, KnnLMConfig)
    return settings


def datastore_directory(args: argparse.Namespace) -> Path:
    """Return the datastore's directory, from ``--store`` or the configuration."""
    return chosen_directory(args, lambda: datastore_settings(args).store)

"""Options that ``llmaas store`` and ``llmaas datastore`` share, and their meaning."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmaas_hooks import ConfigError
from llmaas_plugins.cli.options import add_config_option
from llmaas_plugins.config import PluginTable, load_config, validated

if TYPE_CHECKING:
    from collections.abc import Callable

    from pydantic import BaseModel

__all__ = ["add_action", "chosen_directory", "expanded", "settings_of"]


def add_action(actions: Any, name: str, func: Any, text: str) -> argparse.ArgumentParser:
    """Register an action on a store, with the options that all such actions have."""
    parser: argparse.ArgumentParser = actions.add_parser(name, help=text, description=text)
    add_config_option(parser)
    parser.add_argument(
        "--store", type=Path, metavar="DIR", help="directory of the store (default: as configured)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(func=func)
    return parser


def settings_of(args: argparse.Namespace, plugin: str, model: type[BaseModel]) -> BaseModel:
    """Return a plugin's settings, whether it is enabled or not."""
    table = load_config(args.config).plugins.get(plugin, PluginTable(True, {}, {}))
    return validated(plugin, model, table)


def chosen_directory(args: argparse.Namespace, configured: Callable[[], Path]) -> Path:
    """Return the store's directory, from ``--store`` or the configuration."""
    if args.store is not None and not str(args.store):
        raise ConfigError("--store needs a directory")
    path: Path = args.store or configured()
    return expanded(path)


def expanded(path: Path) -> Path:
    """Return a path with ``~`` replaced by the home directory.

    Raises:
        ConfigError: The named user does not exist.
    """
    try:
        return path.expanduser()
    except RuntimeError as error:
        raise ConfigError(f"{path} names no user's home; expected a directory") from error

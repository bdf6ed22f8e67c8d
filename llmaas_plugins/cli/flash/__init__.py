"""Pack models for streaming, check packed files, and plan memory budgets."""

from llmaas_plugins.cli.flash.command import add_parser

__all__ = ["add_parser"]

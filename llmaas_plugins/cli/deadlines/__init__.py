"""Learn what a setting of an elastic model is worth."""

from llmaas_plugins.cli.deadlines.command import add_parser

__all__ = ["add_parser"]

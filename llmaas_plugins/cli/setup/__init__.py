"""``llmaas setup``: everything that the plugins need for a model, in one command."""

from llmaas_plugins.cli.setup.command import add_parser

__all__ = ["add_parser"]

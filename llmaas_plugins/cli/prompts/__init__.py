"""Learn which words of prompts are worth reading."""

from llmaas_plugins.cli.prompts.command import add_parser

__all__ = ["add_parser"]

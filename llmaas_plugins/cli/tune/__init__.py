"""``llmaas tune``: what each plugin gains on this model and machine, and what to switch on."""

from llmaas_plugins.cli.tune.command import add_parser

__all__ = ["add_parser"]

"""Check this machine, the configuration and a model; partly also when an app starts."""

from llmaas_plugins.cli.doctor.command import add_parser

__all__ = ["add_parser"]

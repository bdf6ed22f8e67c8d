"""Prepare elastic models, and measure their latency."""

from llmaas_plugins.cli.elastic.command import add_parser

__all__ = ["add_parser"]

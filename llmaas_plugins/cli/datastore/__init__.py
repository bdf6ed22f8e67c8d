"""Build, select and inspect datastores of knn_lm."""

from llmaas_plugins.cli.datastore.command import add_parser

__all__ = ["add_parser"]

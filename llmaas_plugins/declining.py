"""Requests that do without a plugin that is on for the others."""

from __future__ import annotations

from contextlib import AbstractContextManager

from llmaas_hooks.discovery import plugin_entry
from llmaas_plugins.activation import active_suite

__all__ = ["without"]


def without(*names: str) -> AbstractContextManager[None]:
    """Let the requests that are started inside the block do without these plugins.

    It holds for this thread or task, and for blocks inside this one. What a plugin does to the
    whole process (weights, contexts that are made) stays as it is.

        with llmaas_plugins.without("knn_lm"):
            llm("Once upon a time")          # the model's own words

    Raises:
        UnknownPluginError: A name is not that of an installed plugin.
    """
    from llmaas_patches import without as decline  # not before somebody needs it

    suite = active_suite()
    known = () if suite is None else suite.config.enabled()
    for name in names:
        if name not in known:  # looking for what is installed takes milliseconds
            plugin_entry(name)
    return decline(names)

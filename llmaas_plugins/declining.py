"""Requests that do not use a plugin that is otherwise active."""

from __future__ import annotations

from contextlib import AbstractContextManager

from llmaas_hooks.discovery import plugin_entry
from llmaas_plugins.activation import active_suite

__all__ = ["without"]


def without(*names: str) -> AbstractContextManager[None]:
    """Exclude plugins from the requests that are started inside the block.

    The block applies to this thread or task; nested blocks add up. A plugin's effects on the whole
    process (weights, contexts that are created) stay.

        with llmaas_plugins.without("knn_lm"):
            llm("Once upon a time")          # the model's own words

    Raises:
        UnknownPluginError: A name is not that of an installed plugin.
    """
    from llmaas_patches import without as decline  # import patches only when needed

    suite = active_suite()
    known = () if suite is None else suite.config.enabled()
    for name in names:
        if name not in known:  # searching installed plugins takes milliseconds
            plugin_entry(name)
    return decline(names)

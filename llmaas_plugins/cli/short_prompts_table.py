"""Settings of ``short_prompts`` with which commands judge words."""

from __future__ import annotations

from typing import Any

__all__ = ["configured"]


def configured(scorer: str | None) -> dict[str, Any]:
    """Return the plugin's table as configured, with the given scorer.

    Args:
        scorer: Name of a scorer; None for the configured one.
    """
    from llmaas_plugins.config import PluginTable, load_config

    table = load_config().plugins.get("short_prompts", PluginTable(True, {}, {}))
    return {**table.values, **({} if scorer is None else {"scorer": scorer})}

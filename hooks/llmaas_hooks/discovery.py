"""Installed plugins: entry points are listed, and imported only on demand."""

from __future__ import annotations

import difflib
import functools
import sys
from collections.abc import Iterable
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from pathlib import Path
from typing import Any

from llmaas_hooks.errors import PluginError, UnknownPluginError

__all__ = ["GROUP", "installed_plugins", "load_plugin", "plugin_entry", "suggest"]

GROUP = "llmaas_plugins"


def installed_plugins() -> dict[str, EntryPoint]:
    """Return the entry points of group ``llmaas_plugins`` by name, sorted; import none of them."""
    return _by_name(_points())


def _points() -> EntryPoints:
    """Return the group's entry points; read them again only if a folder of ``sys.path`` changed."""
    return _read(tuple((folder, _changed_ns(folder)) for folder in sys.path))


@functools.lru_cache(maxsize=1)
def _read(_folders: tuple[tuple[str, int], ...]) -> EntryPoints:
    """Read the metadata of all installed packages, which takes tens of milliseconds."""
    return entry_points(group=GROUP)


def _changed_ns(folder: str) -> int:
    try:
        return Path(folder).stat().st_mtime_ns
    except OSError:
        return 0


def _by_name(points: EntryPoints) -> dict[str, EntryPoint]:
    return dict(sorted({point.name: point for point in points}.items()))


def suggest(word: str, known: Iterable[str]) -> str:
    """Return `` Did you mean 'x'?`` if a known name resembles ``word``, else an empty string."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


def plugin_entry(name: str) -> EntryPoint:
    """Return the entry point of the plugin installed as ``name``, without importing it.

    Raises:
        UnknownPluginError: No plugin is installed under that name.
    """
    return _named(name, _points())


def _named(name: str, points: EntryPoints) -> EntryPoint:
    installed = _by_name(points)
    if name not in installed:
        raise UnknownPluginError(
            f"unknown plugin {name!r}.{suggest(name, installed)} "
            f"Installed: {', '.join(installed) or 'none'}. List them with `llmaas plugins`."
        )
    return installed[name]


def load_plugin(name: str) -> type[Any]:
    """Import the plugin class installed as ``name``.

    Raises:
        UnknownPluginError: No plugin is installed under that name.
        PluginError: The plugin's module cannot be imported, or the entry point names no plugin
            class, or two distributions install that name.
    """
    points = _points()
    entry = _named(name, points)
    try:
        _refuse_two(points.select(name=name))
        return _plugin_class(entry)
    except (Exception, SystemExit) as error:  # an entry point may name a script, which exits
        raise PluginError(name, "import", error) from error


def _refuse_two(points: EntryPoints) -> None:
    if len(points) > 1:
        both = " and ".join(sorted(str(point.dist and point.dist.name) for point in points))
        raise LookupError(f"installed by {both}; uninstall all but one of them")


def _plugin_class(point: EntryPoint) -> type[Any]:
    plugin = point.load()
    if not isinstance(plugin, type) or not isinstance(getattr(plugin, "Config", None), type):
        kind = "class without `Config`" if isinstance(plugin, type) else type(plugin).__name__
        raise TypeError(f"its entry point {point.value!r} is a {kind}, expected a plugin class")
    return plugin

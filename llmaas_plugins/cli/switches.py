"""Plugins switched on and off in ``llmaas.toml``, of which nothing else changes."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

from llmaas_hooks import ConfigError

__all__ = ["switched", "switches"]

_TABLE = re.compile(r"^[ \t]*\[", re.MULTILINE)
_ENABLED = re.compile(r"^([ \t]*enabled[ \t]*=[ \t]*)(true|false)\b", re.MULTILINE)


def switches(text: str) -> dict[str, bool]:
    """Return which of the plugins that a configuration has a table for are on.

    Raises:
        ConfigError: The text is no TOML.
    """
    plugins = _parsed(text)["plugins"]
    return {name: table["enabled"] for name, table in plugins.items()}


def switched(text: str, choice: Mapping[str, bool]) -> str:
    """Return a configuration in which plugins are on or off, and that is the same otherwise.

    Args:
        text: Text of the configuration.
        choice: Whether a plugin is on, by its name. Plugins without a table are left out.

    Raises:
        ConfigError: The text is no TOML, or the table of a plugin is written in another way than
            with a header.
    """
    wanted = _parsed(text)
    for name, is_on in choice.items():
        if wanted["plugins"].get(name, {}).get("enabled", is_on) == is_on:
            continue
        wanted["plugins"][name]["enabled"] = is_on
        candidates = _candidates(text, name, "true" if is_on else "false")
        changed = next((one for one in candidates if _is(one, wanted)), None)
        if changed is None:
            raise ConfigError(
                f"{name} cannot be switched {'on' if is_on else 'off'} without changing more of "
                f"llmaas.toml. Begin its table with the header [plugins.{name}], or set `enabled` "
                "there by hand."
            )
        text = changed
    return text


# -- inside --------------------------------------------------------------------------------------


def _candidates(text: str, name: str, value: str) -> Iterator[str]:
    """Yield texts with the key changed or added behind each line that looks like the header."""
    header = re.compile(
        rf"""^[ \t]*\[\s*plugins\s*\.\s*["']?{re.escape(name)}["']?\s*\][^\n]*(\n|\Z)""",
        re.MULTILINE,
    )
    for found in header.finditer(text):
        head = found[0] if found[0].endswith("\n") else f"{found[0]}\n"
        next_table = _TABLE.search(text, found.end())
        end = next_table.start() if next_table else len(text)
        section = text[found.end() : end]
        changed, n = _ENABLED.subn(rf"\g<1>{value}", section, count=1)
        changed = changed if n else f"enabled = {value}\n{section}"
        yield text[: found.start()] + head + changed + text[end:]


def _is(text: str, wanted: dict[str, Any]) -> bool:
    """Return whether a text has these contents."""
    try:
        return _parsed(text) == wanted
    except ConfigError:
        return False


def _parsed(text: str) -> dict[str, Any]:
    """Return the contents, with the switch of every plugin.

    Raises:
        ConfigError: The text is no TOML, or has something else in place of the plugins' tables.
    """
    try:
        found = tomllib.loads(text.removeprefix("\ufeff"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the configuration is no TOML: {error}") from error
    plugins = found.setdefault("plugins", {})
    if not isinstance(plugins, dict) or not all(isinstance(one, dict) for one in plugins.values()):
        raise ConfigError("the configuration has something else than tables under `plugins`.")
    for table in plugins.values():
        table.setdefault("enabled", True)
    return found

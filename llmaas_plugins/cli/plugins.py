"""``llmaas plugins``: installed and enabled plugins, and their configuration keys."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import json
import sys
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

from llmaas_hooks import NAME, LlmaasError, specs
from llmaas_hooks.discovery import installed_plugins, load_plugin, suggest
from llmaas_plugins.cli.options import add_config_option
from llmaas_plugins.cli.output import setting_text
from llmaas_plugins.config import load_config, validated

if TYPE_CHECKING:
    import argparse
    from importlib.metadata import EntryPoint

    from pydantic import BaseModel

    from llmaas_plugins.config import Config

__all__ = ["Key", "Row", "add_parser", "list_plugins", "plugins"]

_TYPES = {"ByteSize": "size", "Path": "path", "str": "text", "bool": "true or false"}


@dataclasses.dataclass(frozen=True, slots=True)
class Key:
    """One key of a plugin's table.

    Attributes:
        name: Name of the key in ``llmaas.toml``.
        type: Type of the value, such as ``int`` or ``size``, or its choices.
        default: Default as in ``llmaas.toml``, or ``required`` or ``unset``.
        description: Description in the plugin's model.
    """

    name: str
    type: str
    default: str
    description: str


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One plugin.

    Attributes:
        name: Name of the plugin's entry point.
        distribution: Package that installed the plugin, with its version; None if unknown.
        enabled: Whether the configuration enables the plugin.
        loaded: Whether the plugin's module was imported for this list.
        hooks: Hooks that the plugin implements; empty unless loaded.
        keys: Configuration keys of the plugin; empty unless loaded.
        error: Reason why the plugin cannot be used, or None.
    """

    name: str
    distribution: str | None
    enabled: bool
    loaded: bool = False
    hooks: tuple[str, ...] = ()
    keys: tuple[Key, ...] = ()
    error: str | None = None


def add_parser(subparsers: Any) -> None:
    """Register the sub-command."""
    parser = subparsers.add_parser(
        "plugins", help="list the installed plugins, their hooks and their configuration keys"
    )
    add_config_option(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--all", action="store_true", help="also import plugins that are off, to show their keys"
    )
    parser.set_defaults(func=plugins)


def plugins(args: argparse.Namespace) -> int:
    """Print the list; a plugin that fails is a row of the list, not an error."""
    rows = list_plugins(load_config(args.config), load_all=args.all)
    if args.json:
        print(json.dumps([dataclasses.asdict(row) for row in rows], indent=2))
    elif not rows:
        print("No plugin is installed.")
    else:
        print("\n\n".join(_text(row) for row in rows))
    return 0


def list_plugins(config: Config, *, load_all: bool = False) -> list[Row]:
    """Return one row for each installed or enabled plugin; import only the enabled ones.

    Args:
        config: Configuration that says which plugins are enabled.
        load_all: Whether to import the others, too.
    """
    installed = installed_plugins()
    enabled = config.enabled()
    rows = []
    for name in sorted({*installed, *enabled}):
        row = Row(name, _distribution(installed.get(name)), name in enabled)
        if row.enabled or load_all:
            row = _loaded(row, config)
        rows.append(row)
    return rows


def _distribution(point: EntryPoint | None) -> str | None:
    if point is None or point.dist is None:
        return None
    try:
        return f"{point.dist.name} {point.dist.version}" if point.dist.name else None
    except Exception:  # the package's metadata is damaged
        return None


def _loaded(row: Row, config: Config) -> Row:
    try:
        with contextlib.redirect_stdout(sys.stderr):  # plugins must not print into our JSON
            plugin = load_plugin(row.name)
        row = dataclasses.replace(row, loaded=True, hooks=_hooks(plugin), keys=_keys(plugin.Config))
        if row.enabled:
            validated(row.name, plugin.Config, config.plugins[row.name])
    except LlmaasError as error:
        return dataclasses.replace(row, error=str(error))
    except Exception as error:  # the entry point does not name a plugin
        return dataclasses.replace(row, error=f"{type(error).__name__}: {error}")
    return _with_unknown_hooks(row)


def _with_unknown_hooks(row: Row) -> Row:
    for hook in row.hooks:
        if hook not in specs.__all__:
            return dataclasses.replace(
                row, error=f"unknown hook {hook!r}.{suggest(hook, specs.__all__)}"
            )
    return row


def _hooks(plugin: type[Any]) -> tuple[str, ...]:
    marks = (
        (name, getattr(function, f"{NAME}_impl", None))
        for name, function in inspect.getmembers_static(plugin)
    )
    return tuple(sorted(mark.get("specname") or name for name, mark in marks if mark))


def _keys(model: type[BaseModel]) -> tuple[Key, ...]:
    return tuple(
        Key(
            name,
            _type_name(field.annotation),
            "required" if field.is_required() else setting_text(field.get_default()),
            field.description or "",
        )
        for name, field in model.model_fields.items()
    )


def _type_name(annotation: Any) -> str:
    """Return a type in a reader's words: ``None`` is the default ``unset``, and not a choice."""
    kind, parts = get_origin(annotation), get_args(annotation)
    if kind is Literal:
        return " or ".join(f'"{choice}"' for choice in parts)
    if kind is Annotated:
        return _type_name(parts[0])
    if kind in (Union, UnionType):
        return " or ".join(_type_name(part) for part in parts if part is not NoneType)
    if kind in (tuple, list):
        return f"list of {_type_name(parts[0])}"
    if isinstance(annotation, type):
        return _TYPES.get(annotation.__name__, annotation.__name__)
    return inspect.formatannotation(annotation)


def _text(row: Row) -> str:
    state = "enabled" if row.enabled else "off"
    lines = [f"{row.name}  ({row.distribution or 'not installed'})  {state}"]
    if row.error is not None:
        lines.append(f"  error: {' '.join(row.error.split())}")
    if row.hooks:
        lines.append(f"  hooks: {', '.join(row.hooks)}")
    for key in row.keys:
        lines.append(f"  {key.name}: {key.type} = {key.default}")
        lines.extend([f"      {key.description}"] if key.description else [])
    if not row.loaded and row.error is None:
        lines.append("  (not imported; use --all to show its hooks and keys)")
    return "\n".join(lines)

"""One configuration: closed, typed, printable. Precedence: code > environment > file > default.

``llmaas.toml``::

    on_error = "log"                 # what a failing plugin does to the app: "log" or "raise"

    [plugins.kv_chunks]              # a table enables its plugin; enabled = false keeps it off
    codec = "int8"
    ram_budget = "256 MiB"

Environment: ``LLMAAS_CONFIG`` names the file. ``LLMAAS_PLUGINS`` chooses the enabled plugins:
unset, what the file says; empty, none; ``a,b``, exactly those. ``LLMAAS_PLUGINS__NAME__KEY``
sets one key of one plugin.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

from pydantic import BaseModel, ByteSize, ConfigDict, Field, ValidationError

from llmaas_hooks import ConfigError
from llmaas_hooks.discovery import suggest
from llmaas_plugins.sizes import Size

__all__ = ["Config", "PluginTable", "ServiceConfig", "Source", "load_config", "validated"]

Source = Mapping[str, Any] | str | os.PathLike[str] | None
_PREFIX = "LLMAAS_PLUGINS__"


class ServiceConfig(BaseModel):
    """Table ``[service]`` of ``llmaas.toml``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    state_dir: Path = Field(
        default=Path("~/.local/share/llmaas"),
        description="Where the contexts' token logs live (one SQLite file).",
    )
    max_contexts_per_app: int = Field(
        default=16, ge=1, description="Contexts an app may hold at a time (LLMS §3.1, K)."
    )
    max_context_tokens: int | None = Field(
        default=None, ge=16, description="Longest context; the engine's n_ctx when unset."
    )
    at_limit: Literal["slide", "error"] = Field(
        default="slide",
        description="What a context at its longest does: leave its oldest turns out, or refuse.",
    )
    max_new_tokens: int = Field(
        default=256, ge=1, description="Tokens a call generates when it does not say."
    )
    max_queue: int = Field(
        default=32, ge=1, description="Calls that may wait for the engine; one more is refused."
    )
    max_body_bytes: Size = Field(
        default=ByteSize(1 << 20), ge=1024, description="Longest body of a request to the server."
    )
    max_connections: int = Field(
        default=64, ge=1, description="Connections to the server; one more is refused."
    )
    client_timeout_s: float = Field(
        default=30,
        gt=0,
        description="Longest time for a client to send a request, or to take a piece of an answer.",
    )
    shutdown_grace_s: float = Field(
        default=10,
        ge=0,
        description="How long the running call may go on once the server is ended.",
    )
    key_file: Path | None = Field(
        default=None,
        description='TOML file, mode 0600, of lines `app = "key"`: who may use what is an app\'s.',
    )


class _File(BaseModel):
    """The tables a configuration may have."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    on_error: Literal["log", "raise"] = "log"
    plugins: dict[str, dict[str, Any]] = {}
    service: ServiceConfig = ServiceConfig()


@dataclass(frozen=True, slots=True)
class PluginTable:
    """Raw settings of one plugin, not validated yet: its module is loaded only when enabled.

    Attributes:
        enabled: Whether it is switched on.
        values: Its keys.
        origins: Where each key came from: ``code``, ``env`` or the file's name.
    """

    enabled: bool
    values: Mapping[str, Any]
    origins: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Config:
    """A whole configuration.

    Attributes:
        on_error: What a plugin's exception does to the app's call.
        plugins: One table a plugin, by name.
        service: Limits and places of the service.
        origins: Where each other key came from (``on_error``, ``service.max_queue``, …), as in
            ``PluginTable``; what is missing here is a default.
    """

    on_error: Literal["log", "raise"] = "log"
    plugins: Mapping[str, PluginTable] = field(default_factory=dict)
    service: ServiceConfig = field(default_factory=ServiceConfig)
    origins: Mapping[str, str] = field(default_factory=dict, compare=False)

    def enabled(self) -> list[str]:
        """Names of the plugins that are on."""
        return [name for name, table in self.plugins.items() if table.enabled]


def load_config(source: Source = None, environ: Mapping[str, str] | None = None) -> Config:
    """Read a configuration.

    Args:
        source: A mapping shaped like the file (counts as code), the path of a TOML file, or None
            for the file named by ``LLMAAS_CONFIG`` (if any).
        environ: The environment; the process's own by default.

    Raises:
        ConfigError: A file cannot be read, or a key is unknown or has a wrong value.
    """
    environ = os.environ if environ is None else environ
    if isinstance(source, Mapping):
        raw, origin = dict(source), "code"
    else:
        path = source if source is not None else environ.get("LLMAAS_CONFIG")
        raw, origin = _read_file(path)
    try:
        file = _File.model_validate(raw)
    except ValidationError as error:
        raise ConfigError(_explain(error, origin, _File)) from error
    plugins = {name: _table(table, origin) for name, table in file.plugins.items()}
    _apply_environment(plugins, environ, code_wins=origin == "code")
    keys = [f"service.{key}" for key in file.service.model_fields_set]
    keys += file.model_fields_set - {"plugins", "service"}
    return Config(file.on_error, plugins, file.service, dict.fromkeys(keys, origin))


def validated(name: str, model: type[BaseModel], table: PluginTable) -> BaseModel:
    """Settings of plugin ``name`` as its own model.

    Raises:
        ConfigError: A key is unknown (with a suggestion) or has a wrong value (with its origin).
    """
    try:
        return model.model_validate(dict(table.values))
    except ValidationError as error:
        first = error.errors()[0]["loc"]
        origin = table.origins.get(str(first[0]), "code") if first else "code"
        raise ConfigError(_explain(error, f"plugins.{name} ({origin})", model)) from error


def _read_file(path: str | os.PathLike[str] | None) -> tuple[dict[str, Any], str]:
    if not path:
        return {}, "default"
    path = Path(path).expanduser()
    try:
        with path.open("rb") as file:
            return tomllib.load(file), path.name
    except OSError as error:
        raise ConfigError(f"cannot read configuration {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error


def _table(values: Mapping[str, Any], origin: str) -> PluginTable:
    keys = {key: value for key, value in values.items() if key != "enabled"}
    enabled = values.get("enabled", True)
    if not isinstance(enabled, bool):
        raise ConfigError(f"`enabled` must be true or false, found {enabled!r} ({origin})")
    return PluginTable(enabled, keys, dict.fromkeys(keys, origin))


def _apply_environment(
    plugins: dict[str, PluginTable], environ: Mapping[str, str], *, code_wins: bool
) -> None:
    for variable, value in sorted(environ.items()):
        if variable.startswith(_PREFIX):
            name, _, key = variable[len(_PREFIX) :].lower().partition("__")
            if not key:
                raise ConfigError(f"{variable}: expected {_PREFIX}<PLUGIN>__<KEY>")
            _set_from_environment(plugins, name, key, value, code_wins=code_wins)
    chosen = environ.get("LLMAAS_PLUGINS")
    if chosen is None or code_wins:
        return
    wanted = [name.strip() for name in chosen.split(",") if name.strip()]
    for name in {*plugins, *wanted}:
        old = plugins.get(name, PluginTable(False, {}, {}))
        plugins[name] = PluginTable(name in wanted, old.values, old.origins)


def _set_from_environment(
    plugins: dict[str, PluginTable], name: str, key: str, value: str, *, code_wins: bool
) -> None:
    old = plugins.get(name, PluginTable(False, {}, {}))
    if key == "enabled":
        if value.lower() not in ("true", "false", "1", "0"):
            raise ConfigError(f"{_PREFIX}{name.upper()}__ENABLED: expected true or false")
        if not (code_wins and name in plugins):
            enabled = value.lower() in ("true", "1")
            plugins[name] = PluginTable(enabled, old.values, old.origins)
    elif not (code_wins and key in old.values):
        values = {**old.values, key: value}
        plugins[name] = PluginTable(old.enabled, values, {**old.origins, key: "env"})


def _table_model(model: type[BaseModel], path: tuple[int | str, ...]) -> type[BaseModel]:
    """The model of the nested table at ``path``."""
    for part in path:
        nested = model.model_fields[str(part)].annotation
        if not (isinstance(nested, type) and issubclass(nested, BaseModel)):
            break
        model = nested
    return model


def _explain(error: ValidationError, where: str, model: type[BaseModel]) -> str:
    lines = []
    for item in error.errors():
        key = ".".join(str(part) for part in item["loc"]) or "(whole table)"
        if item["type"] == "extra_forbidden":
            known = sorted(_table_model(model, item["loc"][:-1]).model_fields)
            hint = suggest(str(item["loc"][-1]), known)
            lines.append(f"unknown key {key!r}.{hint} Known: {', '.join(known)}")
        else:
            found = cast("object", item["input"])
            lines.append(f"{key}: {item['msg']}, found {found!r}")
    return f"{where}: " + "; ".join(lines)

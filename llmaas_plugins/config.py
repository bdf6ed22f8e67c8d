"""Configuration: closed, typed, printable. Precedence: code > environment > file > default.

``llmaas.toml``::

    on_error = "log"                 # what a failing plugin does to the app: "log" or "raise"

    [plugins.kv_chunks]              # a table enables its plugin; enabled = false keeps it off
    codec = "int8"
    ram_budget = "256 MiB"

    [memory]
    budget = "3 GiB"                 # of the process, divided among all plugins

    [models."/home/me/your.gguf"]    # a file to load in its place; `llmaas setup` writes this
    file = "/home/me/your.elastic.gguf"
    digest = "…"                     # of both files: the table is void once one of them changes
    file_digest = "…"

    [cloud]                          # asked first by `llmaas serve`, as long as it answers
    base_url = "https://api.example.org/v1"
    model = "large"
    key_env = "EXAMPLE_API_KEY"      # the variable with the key

The file is the first of these: the one named in code or by ``--config``, the one named by
``LLMAAS_CONFIG`` (an empty value means no file), ``./llmaas.toml``, and
``~/.config/llmaas/llmaas.toml``. A file that was found without being named is logged.

The environment variable ``LLMAAS_PLUGINS`` chooses the enabled plugins. Unset, the file decides;
empty, none is enabled; ``a,b`` enables exactly those. ``LLMAAS_PLUGINS__NAME__KEY`` sets one key of
one plugin, but does not enable the plugin.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, cast, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    ValidationError,
)

from llmaas_hooks import ConfigError
from llmaas_hooks.discovery import installed_plugins, suggest
from llmaas_plugins.cloud_config import UNQUOTED, CloudConfig
from llmaas_plugins.config_file import chosen_file, read_config_file
from llmaas_plugins.memory.config import MemoryConfig
from llmaas_plugins.model.made_files import MadeFile
from llmaas_plugins.service_config import ServiceConfig
from llmaas_plugins.validation import validate

__all__ = [
    "CloudConfig",
    "Config",
    "PluginTable",
    "ServiceConfig",
    "Source",
    "load_config",
    "validated",
]

Source = Mapping[str, Any] | str | os.PathLike[str] | None
_Settings = TypeVar("_Settings", bound=BaseModel)
_PREFIX = "LLMAAS_PLUGINS__"
_VARIABLES = ("LLMAAS_CONFIG", "LLMAAS_PLUGINS")
_TOOLS = ("LLMAAS_BENCH_", "LLMAAS_DATA", "LLMAAS_FUZZ_SEED", "LLMAAS_SOAK")
"""Beginnings of variables that tests and benchmarks read."""
_PLAIN = {
    "bool_parsing": "expected true or false",
    "bool_type": "expected true or false",
    "dict_type": "expected a table",
    "float_parsing": "expected a number",
    "finite_number": "expected a finite number",
    "float_type": "expected a number",
    "greater_than": "expected more than {gt}",
    "greater_than_equal": "expected at least {ge}",
    "int_from_float": "expected an integer",
    "int_parsing": "expected an integer",
    "int_parsing_size": "expected an integer of fewer digits",
    "int_type": "expected an integer",
    "less_than_equal": "expected at most {le}",
    "literal_error": "expected {expected}",
    "missing": "expected a value",
    "model_type": "expected a table",
    "path_type": "expected a path",
    "string_type": "expected a text",
    "tuple_type": "expected a list",
}
"""Messages by pydantic's type of error; for other types, pydantic's own."""


class _File(BaseModel):
    """Tables that a configuration may have."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    on_error: Literal["log", "raise"] = "log"
    plugins: dict[str, dict[str, Any]] = {}
    service: ServiceConfig = ServiceConfig()
    memory: MemoryConfig = MemoryConfig()
    models: dict[str, MadeFile] = {}
    cloud: CloudConfig | None = None


@dataclass(frozen=True, slots=True)
class PluginTable:
    """Raw settings of one plugin, which are validated when the plugin is loaded.

    Attributes:
        enabled: Whether the plugin is enabled.
        values: Values by key.
        origins: Origin of each key: ``code``, ``env`` or the file's name.
        is_chosen: Whether the configuration enabled or disabled the plugin explicitly. A variable
            that sets a key does neither.
    """

    enabled: bool
    values: Mapping[str, Any]
    origins: Mapping[str, str]
    is_chosen: bool = field(default=True, compare=False)


@dataclass(frozen=True, slots=True)
class Config:
    """Complete configuration.

    Attributes:
        on_error: Effect of a plugin's exception on the app's call.
        plugins: Tables of the plugins, by name.
        service: Limits and paths of the service.
        memory: Memory budget of the process.
        models: Files to load in place of models, by the models' absolute paths.
        cloud: The service that `llmaas serve` asks first; None if it asks none.
        origins: Origin of each other key (``on_error``, ``service.max_queue``, …), as in
            ``PluginTable``. Keys that are missing here have defaults.
        file: The file that was read, if any.
        is_none_meant: Whether enabling no plugin may be intended: the configuration was made in
            code, or ``LLMAAS_PLUGINS`` is set.
        unknown: Variables named like the suite's own that nothing reads.
    """

    on_error: Literal["log", "raise"] = "log"
    plugins: Mapping[str, PluginTable] = field(default_factory=dict)
    service: ServiceConfig = field(default_factory=ServiceConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    models: Mapping[str, MadeFile] = field(default_factory=dict)
    cloud: CloudConfig | None = None
    origins: Mapping[str, str] = field(default_factory=dict, compare=False)
    file: Path | None = field(default=None, compare=False)
    is_none_meant: bool = field(default=True, compare=False)
    unknown: tuple[str, ...] = field(default=(), compare=False)

    def enabled(self) -> list[str]:
        """Return the names of the enabled plugins."""
        return [name for name, table in self.plugins.items() if table.enabled]

    def with_default(self, name: str) -> Config:
        """Return this configuration with plugin ``name`` enabled, if no plugin was chosen."""
        if self.is_none_meant or any(table.is_chosen for table in self.plugins.values()):
            return self
        table = self.plugins.get(name, PluginTable(False, {}, {}))
        return replace(self, plugins={**self.plugins, name: replace(table, enabled=True)})

    def without_effect(self) -> Iterator[str]:
        """Yield a message for each variable that is unknown, or whose plugin is not enabled."""
        yield from map(_unknown_variable, self.unknown)
        for name, table in self.plugins.items():
            if table.enabled or table.is_chosen:
                continue
            variables = ", ".join(f"{_PREFIX}{name}__{key}".upper() for key in table.values)
            installed = installed_plugins()
            if name in installed:
                reason = f"{name} is off. LLMAAS_PLUGINS={name} enables it."
            else:
                known = ", ".join(installed) or "none"
                reason = f"no plugin {name!r} is installed.{suggest(name, installed)}"
                reason += f" Installed: {known}."
            yield f"{variables} has no effect: {reason}"

    def nothing_enabled(self) -> str | None:
        """Return a message if no plugin is enabled and that seems unintended, else None."""
        if self.enabled() or self.is_none_meant:
            return None
        where = self.file or "llmaas.toml"
        return (
            "no plugin is enabled, so apps run without llmaas. LLMAAS_PLUGINS=kv_chunks, or a "
            f"table [plugins.kv_chunks] in {where}, enables one; `llmaas plugins` lists them."
        )


def load_config(source: Source = None, environ: Mapping[str, str] | None = None) -> Config:
    """Read a configuration.

    Args:
        source: A mapping shaped like the file (it counts as code, and no file is read), or the path
            of a TOML file. None means the file that ``LLMAAS_CONFIG`` names or that is found.
        environ: Environment variables; by default those of the process.

    Raises:
        ConfigError: A file cannot be read, or a key is unknown or has a wrong value.
    """
    environ = os.environ if environ is None else environ
    if isinstance(source, Mapping):
        path, raw, origin = None, dict(source), "code"
    else:
        path, is_found = (Path(source), False) if source is not None else chosen_file(environ)
        raw = {} if path is None else read_config_file(path, is_found=is_found)
        origin = "default" if path is None else path.name
    try:
        file = validate(_File, raw)
    except ValidationError as error:
        raise ConfigError(_explain(error, origin, _File)) from error
    service = _placed("service", file.service, dict(raw.get("service", {})))
    models = {_absolute(name): _placed("models", one, {}) for name, one in file.models.items()}
    plugins = {name: _table(name, table, origin) for name, table in file.plugins.items()}
    _apply_environment(plugins, environ, code_wins=origin == "code")
    keys = [f"service.{key}" for key in file.service.model_fields_set]
    keys += [f"memory.{key}" for key in file.memory.model_fields_set]
    keys += [f"cloud.{key}" for key in file.cloud.model_fields_set] if file.cloud else []
    keys += file.model_fields_set - {"plugins", "service", "memory", "models", "cloud"}
    is_none_meant = origin == "code" or "LLMAAS_PLUGINS" in environ
    origins = dict.fromkeys(keys, origin)
    unknown = tuple(filter(_is_unknown, sorted(environ)))
    return Config(
        file.on_error,
        plugins,
        service,
        file.memory,
        models,
        file.cloud,
        origins,
        path,
        is_none_meant,
        unknown,
    )


def _absolute(model: str) -> str:
    """Return the absolute path of a model.

    Raises:
        ConfigError: The path contains NUL, or is in the home of an unknown user.
    """
    if "\0" in model:
        raise ConfigError(f"models: expected a path without NUL, found {model!r}")
    try:
        return str(Path(model).expanduser().absolute())
    except RuntimeError as error:
        raise ConfigError(f"models: {model} is in the home of no user") from error


def validated(name: str, model: type[BaseModel], table: PluginTable) -> BaseModel:
    """Return the settings of plugin ``name``, validated by the plugin's own model.

    Raises:
        ConfigError: A key is unknown (with a suggestion) or has a wrong value (with its origin).
    """
    try:
        settings = validate(model, dict(table.values))
    except ValidationError as error:
        first = error.errors()[0]["loc"]
        origin = table.origins.get(str(first[0]), "code") if first else "code"
        raise ConfigError(_explain(error, f"plugins.{name} ({origin})", model)) from error
    return _placed(f"plugins.{name}", settings, table.values)


def _placed(where: str, settings: _Settings, raw: Mapping[str, Any]) -> _Settings:
    """Return settings with absolute paths, because an app may change its working directory.

    Raises:
        ConfigError: A path is empty, contains NUL, or is ``~user`` of an unknown user. Using it
            would fail only later, or would mean the current folder.
    """
    placed: dict[str, Path] = {}
    for key, value in settings:
        if isinstance(value, Path):
            if raw.get(key) == "":
                raise ConfigError(f'{where}.{key} is empty, expected a path; "." is this folder')
            if "\0" in str(value):
                raise ConfigError(
                    f"{where}.{key}: expected a path without NUL, found {str(value)!r}"
                )
            try:
                is_absolute = value.expanduser().is_absolute()
            except RuntimeError as error:
                raise ConfigError(f"{where}.{key}: {value} is the home of no user") from error
            if not is_absolute:
                placed[key] = value.absolute()
    return settings.model_copy(update=placed)


def _table(name: str, values: Mapping[str, Any], origin: str) -> PluginTable:
    keys = {key: value for key, value in values.items() if key != "enabled"}
    enabled = values.get("enabled", True)
    if not isinstance(enabled, bool):
        raise ConfigError(
            f"plugins.{name}.enabled: expected true or false, found {enabled!r} ({origin})"
        )
    return PluginTable(enabled, keys, dict.fromkeys(keys, origin))


def _is_unknown(variable: str) -> bool:
    """Return whether a variable is named like the suite's own, but nothing reads it."""
    is_ours = variable.startswith("LLMAAS_")
    return is_ours and variable not in _VARIABLES and not variable.startswith((_PREFIX, *_TOOLS))


def _unknown_variable(variable: str) -> str:
    """Return the message for an unknown variable."""
    # compared without the common beginning, which would make all of them alike
    begin, name = "LLMAAS_", variable.partition("__")[0].removeprefix("LLMAAS_")
    hint = suggest(name, [known.removeprefix(begin) for known in _VARIABLES])
    hint = hint.replace("'", f"'{begin}", 1)
    return (
        f"{variable} has no effect: there is no such variable.{hint} "
        f"Known: {', '.join(_VARIABLES)}, {_PREFIX}<PLUGIN>__<KEY>; all else is set in llmaas.toml."
    )


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
    for name in dict.fromkeys((*plugins, *wanted)):
        old = plugins.get(name, PluginTable(False, {}, {}))
        plugins[name] = PluginTable(name in wanted, old.values, old.origins)


def _set_from_environment(
    plugins: dict[str, PluginTable], name: str, key: str, value: str, *, code_wins: bool
) -> None:
    old = plugins.get(name, PluginTable(False, {}, {}, is_chosen=False))
    if key == "enabled":
        if value.lower() not in ("true", "false", "1", "0"):
            raise ConfigError(f"{_PREFIX}{name.upper()}__ENABLED: expected true or false")
        if not (code_wins and name in plugins):
            enabled = value.lower() in ("true", "1")
            plugins[name] = PluginTable(enabled, old.values, old.origins)
    elif not (code_wins and key in old.values):
        values = {**old.values, key: value}
        origins = {**old.origins, key: "env"}
        plugins[name] = replace(old, values=values, origins=origins)


def _table_model(model: type[BaseModel], path: tuple[int | str, ...]) -> type[BaseModel]:
    """Return the model of the nested table at ``path``, which may lead through tables by name."""
    for part in path:
        if (field := model.model_fields.get(str(part))) is None:
            continue  # the name of a table, such as that of an app
        kinds = (field.annotation, *get_args(field.annotation))
        nested = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
        if not nested:
            break
        model = nested[0]
    return model


def _explain(error: ValidationError, where: str, model: type[BaseModel]) -> str:
    lines = []
    for item in error.errors():
        key = ".".join(str(part) for part in item["loc"]) or "(whole table)"
        if item["type"] == "extra_forbidden":
            known = sorted(_table_model(model, item["loc"][:-1]).model_fields)
            hint = suggest(str(item["loc"][-1]), known)
            if model is _File and key in installed_plugins():
                hint = f" Did you mean 'plugins.{key}'?"
            lines.append(f"unknown key {key!r}.{hint} Known: {', '.join(known)}")
        else:
            is_quoted = item["type"] not in (UNQUOTED, "missing")
            found = f", found {cast('object', item['input'])!r}" if is_quoted else ""
            plain = _PLAIN.get(item["type"])
            message = plain.format(**item.get("ctx", {})) if plain else item["msg"]
            message = message.removeprefix("Value error, ")  # which pydantic adds
            lines.append(f"{key}: {message.removesuffix(found)}{found}")
    return f"{where}: " + "; ".join(lines)

"""Checks of ``llmaas doctor``; each returns findings and raises nothing."""

from __future__ import annotations

import importlib
import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING

from llmaas_hooks import ConfigError, HookManager, LlmaasError, UnknownPluginError
from llmaas_hooks.discovery import load_plugin
from llmaas_plugins import __version__
from llmaas_plugins.activation import make_plugin
from llmaas_plugins.cli.doctor.findings import Finding
from llmaas_plugins.cli.doctor.resources import resource_findings
from llmaas_plugins.config import Config, load_config, validated
from llmaas_plugins.machine import memory_limit_bytes, room
from llmaas_plugins.model.made_files import problem_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pydantic import BaseModel

__all__ = ["diagnose"]

_MIB = 1 << 20
_STEPS: dict[type[Exception], str] = {
    ConfigError: "correct it where it was set; `llmaas plugins` lists the keys",
    UnknownPluginError: "install it, or remove it from the configuration",
}
_REPORT = "reinstall the plugin, or remove it from the configuration"


def diagnose(config_file: str | None = None, model: Path | None = None) -> list[Finding]:
    """Run all checks; without a model, nothing is changed or opened.

    Args:
        config_file: Path of a ``llmaas.toml``; by default, the one chosen without ``--config``.
        model: Model to open as an app would, with the configured plugins.
    """
    findings = [*_versions(), _kernels(), *_patches()]
    try:
        config = load_config(config_file)
    except ConfigError as error:
        step = "correct the file or the variable that the message names"
        return [*findings, Finding("configuration", "llmaas.toml", None, None, str(error), step)]
    settings = _settings(config)
    findings += [*settings, *_models(config), *_directories(settings), _memory()]
    findings += resource_findings(config)
    if model is not None:
        from llmaas_plugins.cli.doctor.trial import model_findings

        findings += model_findings(model, config)
    return findings


def _versions() -> list[Finding]:
    python = Finding("versions", "python", platform.python_version())
    ours = Finding("versions", "llmaas-plugins", __version__)
    return [python, ours, _engine(), _hook_point()]


def _engine() -> Finding:
    name, step = "llama-cpp-python", "pip install --upgrade llmaas-plugins"
    try:
        llama_cpp = importlib.import_module("llama_cpp")
        compat = importlib.import_module("llmaas_patches.compat")
    except (ImportError, OSError, RuntimeError) as error:  # its shared library is missing or broken
        return Finding("versions", name, None, None, f"cannot be imported: {error}", step)
    found = llama_cpp.__version__
    tested = ", ".join(compat.TESTED_VERSIONS)
    value = f"{found} (needed: {compat.VERSION_RANGE}, tested: {tested})"
    try:
        compat.check_version()
    except LlmaasError as error:
        step = f"pip install llama-cpp-python=={compat.NEWEST_VERSION}"
        return Finding("versions", name, value, None, str(error), step)
    return Finding("versions", name, value)


def _hook_point() -> Finding:
    """Report whether the engine has a hook point; plugins that need it stay off without it."""
    try:
        importlib.import_module("llmaas_patches.native").load_library()
        return Finding("versions", "hook point in the engine", "available")
    except Exception as error:
        return Finding("versions", "hook point in the engine", f"not available: {error}")


def _kernels() -> Finding:
    try:
        native = importlib.import_module("llmaas_plugins._native")
        return Finding("versions", "CPU kernels", native.kernels_name())
    except Exception as error:
        step = "build the C core: `pip install -e .` in the source tree, or reinstall the wheel"
        problem = f"the C core cannot be loaded: {error}"
        return Finding("versions", "CPU kernels", None, None, problem, step)


def _patches() -> list[Finding]:
    try:
        patcher = importlib.import_module("llmaas_patches.patcher")
        table = importlib.import_module("llmaas_patches.table")
    except Exception as error:
        step = "make llama-cpp-python importable first"
        return [Finding("patches", "all", None, None, f"cannot be checked: {error}", step)]
    findings = []
    for target, problem in patcher.check(table.PATCHES):
        cure = None if problem is None else "install one of the tested versions listed above"
        findings.append(Finding("patches", target, None, None, problem, cure))
    return findings


def _settings(config: Config) -> list[Finding]:
    origin = config.origins.get("on_error", "default")
    findings = [
        Finding("configuration", "file", "none" if config.file is None else str(config.file)),
        Finding("configuration", "on_error", config.on_error, origin),
    ]
    findings += [
        Finding("configuration", line.partition(" ")[0], None, None, line, "correct it or unset it")
        for line in config.without_effect()
    ]
    if (line := config.nothing_enabled()) is not None:
        findings.append(Finding("configuration", "plugins", "none", next_step=line))
    findings += _values("service", config.service, _origins("service", config))
    findings += _values("memory", config.memory, _origins("memory", config))
    findings += _cloud(config)
    for name, table in config.plugins.items():
        if table.enabled:
            findings += _plugin_settings(name, config)
        else:
            findings.append(Finding("configuration", f"plugins.{name}", "off"))
    return findings


def _origins(table: str, config: Config) -> dict[str, str]:
    """Return the origins of a table's keys."""
    prefix = f"{table}."
    return {
        key.removeprefix(prefix): origin
        for key, origin in config.origins.items()
        if key.startswith(prefix)
    }


def _cloud(config: Config) -> list[Finding]:
    """Check the cloud that the service asks; the key itself is not shown."""
    if (cloud := config.cloud) is None:
        return []
    origins = _origins("cloud", config)
    findings = [one for one in _values("cloud", cloud, origins) if one.name != "cloud.apps"]
    for name, app in cloud.apps.items():
        use = "private" if app.private else "sent and kept" if app.keep else "sent"
        findings.append(Finding("configuration", f"cloud.apps.{name}", use, origins["apps"]))
    if cloud.key_env is not None and not os.environ.get(cloud.key_env):
        problem = f"the variable {cloud.key_env} is not set"
        step = "set it to the service's key"
        findings.append(Finding("configuration", "cloud key", None, None, problem, step))
    return findings


def _models(config: Config) -> list[Finding]:
    """Check the files that are loaded in place of models."""
    return [
        Finding(
            "configuration",
            f"models.{model}",
            str(made.file),
            None if config.file is None else config.file.name,
            problem := problem_of(Path(model), made),
            None if problem is None else f"`llmaas setup {model}` makes the file again",
        )
        for model, made in config.models.items()
    ]


def _plugin_settings(name: str, config: Config) -> list[Finding]:
    table, hooks = config.plugins[name], HookManager()
    try:
        hooks.register(name, make_plugin(name, config))  # this opens nothing
        settings = validated(name, load_plugin(name).Config, table)
        return _values(f"plugins.{name}", settings, table.origins)
    except Exception as error:  # a plugin may raise anything
        problem, step = f"{type(error).__name__}: {error}", _STEPS.get(type(error), _REPORT)
        return [Finding("configuration", f"plugins.{name}", None, None, problem, step)]
    finally:
        hooks.shutdown()


def _values(prefix: str, settings: BaseModel, origins: Mapping[str, str]) -> list[Finding]:
    return [
        Finding("configuration", f"{prefix}.{key}", value, origins.get(key, "default"))
        for key, value in settings
    ]


def _directories(settings: list[Finding]) -> list[Finding]:
    """Check each setting that is a path, because something will be written to that directory."""
    findings = []
    for setting in settings:
        if not isinstance(setting.value, Path):
            continue
        found = room(setting.value)
        value = f"{setting.value}, {found.free_bytes // _MIB} MiB free"
        problem = step = None
        if not found.is_writable:
            problem = "this process cannot write there"
            step = f"set {setting.name} to a directory that user {os.getuid()} can write"
        findings.append(Finding("machine", setting.name, value, None, problem, step))
    return findings


def _memory() -> Finding:
    limit = memory_limit_bytes()
    value = "none" if limit is None else f"{limit // _MIB} MiB"
    return Finding("machine", "cgroup memory limit", value)

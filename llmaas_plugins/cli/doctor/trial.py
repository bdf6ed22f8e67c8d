"""``llmaas doctor --model``: trial of the configured plugins on a model."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmaas_hooks import LlmaasError, PluginError
from llmaas_plugins.activation import activate
from llmaas_plugins.cli.doctor.findings import Finding
from llmaas_plugins.cli.doctor.resources import short_of_room
from llmaas_plugins.cli.output import size_text
from llmaas_plugins.machine import available_bytes
from llmaas_plugins.model.gguf_header import read_header
from llmaas_plugins.server import import_server

if TYPE_CHECKING:
    from llmaas_plugins.config import Config

__all__ = ["left_alone", "model_findings"]

_N_CTX = 512
_SECTION = "model"
_FITS = "fit into"


class _Said(logging.Handler):
    """Log handler that collects the plugins' warnings while other logs do not get them."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep each message once."""
        if (line := record.getMessage()) not in self.lines:
            self.lines.append(line)


def model_findings(model: Path, config: Config) -> list[Finding]:
    """Open a model as an app would, evaluate a token, and report what each plugin did.

    Args:
        model: Path of a GGUF file.
        config: Configuration of the plugins.
    """
    try:
        header = read_header(model)
    except LlmaasError as error:
        return [_problem("file", str(error), "give a model in GGUF")]
    arch = header.fields.get("general.architecture")
    findings = [Finding(_SECTION, "file", f"{model}, {arch}, {size_text(header.n_bytes)}")]
    has = available_bytes()
    if header.n_bytes > has and "flash_weights" not in config.enabled():
        problem = (
            f"its {size_text(header.n_bytes)} do not fit into memory, which has {has >> 20} MiB"
        )
        step = f"enable flash_weights; `llmaas flash plan {model}` recommends a budget"
        return [*findings, _problem("memory", problem, step)]
    with _listening() as said:
        findings += _opened(model, config)
    told = [finding.problem or "" for finding in findings]
    notes = [line for line in said.lines if not any(_is_same(line, problem) for problem in told)]
    notes = [line for line in notes if line != config.nothing_enabled()]  # it is said above
    findings += [Finding(_SECTION, f"note {i}", line) for i, line in enumerate(notes, start=1)]
    return findings


def _opened(model: Path, config: Config) -> Iterator[Finding]:
    from llama_cpp import Llama

    import_server()  # memory budgets are checked as for `llmaas serve`
    try:
        with (
            activate(config) as suite,
            contextlib.closing(Llama(str(model), n_ctx=_N_CTX, verbose=False)) as llama,
        ):
            llama.create_completion("A", max_tokens=1, temperature=0.0)
            status = suite.status()
    except (LlmaasError, ValueError, RuntimeError) as error:
        step = "correct the setting that it names, or remove the plugin from the configuration"
        name = f"plugins.{error.plugin}" if isinstance(error, PluginError) else "opening it"
        return iter([_problem(name, str(error), step)])
    return _reported(config, status)


def _reported(config: Config, status: dict[str, Any]) -> Iterator[Finding]:
    errors = status["errors"]
    if config.enabled():
        yield Finding(_SECTION, "memory by owner", status["memory"])
    for name in config.enabled():
        failed = errors.get(name, {})
        report = status["plugins"].get(name) or {}
        left = left_alone(report)
        if failed:
            first = next(iter(failed.values()))
            step = f"correct it, or remove {name} from the configuration"
            yield _problem(f"plugins.{name}", str(first["last"]), step)
        elif left is not None and _FITS in left:
            yield Finding(_SECTION, f"plugins.{name}", f"not needed: {left}")
        elif left is not None:
            step = f"do that, or remove {name} from the configuration"
            yield _problem(f"plugins.{name}", f"leaves the model unchanged: {left}", step)
        else:
            yield Finding(_SECTION, f"plugins.{name}", "serves this model")
            is_set = "ram_budget" in config.plugins[name].values  # else contexts take the rest
            wanted = report.get("ram_budget_bytes", 0) if is_set else 0
            if (left := report.get("obtainable_bytes", wanted)) < wanted:
                yield short_of_room(_SECTION, wanted, left, "beside this model")


def left_alone(report: dict[str, Any]) -> str | None:
    """Return why a plugin leaves the model alone, or None if it does not."""
    found = report.get("left_alone")
    reasons = list(found.values()) if isinstance(found, dict) else found
    return str(reasons[0]) if isinstance(reasons, list | tuple) and reasons else None


def _is_same(line: str, problem: str) -> bool:
    """Return whether a line of the log has the same reason as a problem."""
    _, _, reason = problem.partition(": ")
    return bool(reason) and reason in line


def _problem(name: str, problem: str, step: str) -> Finding:
    return Finding(_SECTION, name, None, None, problem, step)


@contextlib.contextmanager
def _listening() -> Iterator[_Said]:
    said, logger = _Said(), logging.getLogger("llmaas")
    propagates, logger.propagate = logger.propagate, False
    logger.addHandler(said)
    try:
        yield said
    finally:
        logger.removeHandler(said)
        logger.propagate = propagates

"""Checks whether this machine has the memory, disk space and files that plugins need."""

from __future__ import annotations

import contextlib
import logging
import math
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from llmaas_hooks import LlmaasError
from llmaas_hooks.discovery import load_plugin
from llmaas_plugins.cli.doctor.findings import Finding
from llmaas_plugins.cli.output import size_text
from llmaas_plugins.config import load_config, validated
from llmaas_plugins.files.store_lock import user
from llmaas_plugins.kv_chunks.store.store_files import FILES, LOCK
from llmaas_plugins.machine import available_bytes, resident_bytes, room

if TYPE_CHECKING:
    from pathlib import Path

    from llmaas_plugins.config import Config

__all__ = ["resource_findings", "say_problems", "short_of_room", "store_user"]

_log = logging.getLogger("llmaas.cli")


def resource_findings(config: Config) -> list[Finding]:
    """Check what each enabled plugin needs of this machine; changes nothing."""
    found = {}
    for name in config.enabled():
        if name not in _LOOKS:
            continue
        with contextlib.suppress(LlmaasError):  # reported with the settings
            found[name] = validated(name, load_plugin(name).Config, config.plugins[name])
    findings = [finding for name, settings in found.items() for finding in _LOOKS[name](settings)]
    if config.memory.budget is not None:
        findings.append(_memory("memory.budget", config.memory.budget))
    worse = {one.name: one for one in _together(found.get("kv_chunks"), found.get("flash_weights"))}
    return [worse.get(one.name, one) if one.problem is None else one for one in findings]


def say_problems(config: Config) -> None:
    """Log each problem in one line when an app starts."""
    for finding in resource_findings(config):
        if finding.problem is not None:
            _log.warning("%s: %s; %s", finding.name, finding.problem, finding.next_step)


def store_user(path: Path) -> str | None:
    """Return the process that holds a configuration's store of contexts; None if none is known."""
    with contextlib.suppress(LlmaasError):
        config = load_config(str(path))
        if "kv_chunks" in config.enabled():
            kind, table = load_plugin("kv_chunks").Config, config.plugins["kv_chunks"]
            settings: Any = validated("kv_chunks", kind, table)
            return user(settings.store.expanduser() / LOCK, FILES)
    return None


def _kv_chunks(settings: Any) -> Iterator[Finding]:
    if settings.ram_budget is not None:
        yield _memory("plugins.kv_chunks.ram_budget", settings.ram_budget)
    directory = settings.store.expanduser()
    if settings.disk_budget:
        yield from _holder(directory)
    slab = directory / "chunks.slab"
    taken = slab.stat().st_blocks * 512 if slab.is_file() else 0
    has, name = taken + room(directory).free_bytes, "plugins.kv_chunks.disk_budget"
    if settings.disk_budget <= has:
        yield Finding("machine", name, f"{size_text(settings.disk_budget)}, and there is room")
        return
    problem = (
        f"{size_text(settings.disk_budget)} do not fit on the disk of {directory}, which has room "
        f"for {size_text(has)}"
    )
    step = "lower it, free space, or set plugins.kv_chunks.store to another disk"
    yield Finding("machine", name, None, None, problem, step)


def _holder(directory: Path) -> Iterator[Finding]:
    """Report a process that holds the store, because a second one would go on without it."""
    try:
        who = user(directory / LOCK, FILES)
    except LlmaasError as error:
        yield Finding("machine", "KV store", None, None, str(error), "remove it")
        return
    if who is not None:
        problem = f"{directory} is in use by {who}, so other apps store and load no contexts"
        step = "stop that process, or set plugins.kv_chunks.store to another directory"
        yield Finding("machine", "KV store", None, None, problem, step)


def _flash_weights(settings: Any) -> Iterator[Finding]:
    if settings.memory_budget is not None:
        yield _memory("plugins.flash_weights.memory_budget", settings.memory_budget)


def _together(kv_chunks: Any, flash_weights: Any) -> Iterator[Finding]:
    """Report a RAM budget that the memory budget of the process does not leave to contexts."""
    budgets = [
        getattr(kv_chunks, "ram_budget", None),
        getattr(flash_weights, "memory_budget", None),
    ]
    if None in budgets:
        return
    wanted, process = int(kv_chunks.ram_budget), resident_bytes()
    left = max(0, int(flash_weights.memory_budget) - process)
    if wanted > left:
        beside = f"beside the {process >> 20} MiB of this process without a model"
        yield short_of_room("machine", wanted, left, beside)


def short_of_room(section: str, wanted: int, left: int, beside: str) -> Finding:
    """Return a finding: contexts get only ``left`` bytes of the RAM budget ``wanted``."""
    problem = (
        f"contexts get {left >> 20} of the {math.ceil(wanted / (1 << 20))} MiB, because "
        f"plugins.flash_weights.memory_budget leaves no more {beside}"
    )
    step = "lower it, or raise plugins.flash_weights.memory_budget"
    return Finding(section, "plugins.kv_chunks.ram_budget", None, None, problem, step)


def _knn_lm(settings: Any) -> Iterator[Finding]:
    from llmaas_plugins.knn_lm.archive.files import SELECTED
    from llmaas_plugins.knn_lm.datastore.file import DatastoreFile

    directory, name = settings.store.expanduser(), "plugins.knn_lm.datastore"
    step = "build one with `llmaas datastore build EXPORT --model GGUF`"
    path = directory / SELECTED
    if os.path.lexists(path):
        try:
            DatastoreFile(
                path
            ).close()  # reads only the first page, because this runs at every start
        except LlmaasError as error:
            step = "select it again with `llmaas datastore select`"
            yield Finding("machine", name, None, None, str(error), step)
        else:
            yield Finding("machine", name, str(path))
    elif settings.learn:
        yield Finding("machine", name, f"none yet in {directory}", next_step=step)
    else:
        problem = f"there is no datastore in {directory}, so nothing is mixed or proposed"
        yield Finding("machine", name, None, None, problem, step)


def _memory(name: str, wanted: int) -> Finding:
    available = available_bytes()
    if wanted <= available:
        return Finding("machine", name, f"{size_text(wanted)} of {size_text(available)}")
    problem = f"{size_text(wanted)} of memory, but this process can have {size_text(available)}"
    return Finding("machine", name, None, None, problem, "lower it, or close other programs")


_LOOKS: dict[str, Callable[[Any], Iterator[Finding]]] = {
    "kv_chunks": _kv_chunks,
    "flash_weights": _flash_weights,
    "knn_lm": _knn_lm,
}

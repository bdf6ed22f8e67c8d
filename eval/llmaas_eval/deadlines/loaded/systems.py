"""Systems to compare: how each serves requests, and which levels it uses for them.

All systems use the same prepared file, kernels and server. The narrowed models of other papers are
not told apart here: a share of the weights takes the time of a level of that share.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

__all__ = [
    "COMPRESSED",
    "HALF_OF",
    "KINDS",
    "LEAST_SHARE",
    "SYSTEMS",
    "Kind",
    "System",
    "config_text",
]

Kind = Literal["warm", "cold"]
KINDS: tuple[Kind, ...] = ("warm", "cold")
"""Whether the app's prefix is stored before the trace begins, or nothing can be reused."""


@dataclass(frozen=True, slots=True)
class System:
    """A way to serve requests.

    Attributes:
        label: Name in tables.
        levels: Levels of an app's requests: the whole model; the widest pair of levels, or the
            widest single level, that keeps the promise on an idle machine; the narrowest level; or
            levels that ``deadlines`` plans for each request.
        is_scheduled: Whether the earliest deadline goes first, in place of the first arrival.
        preempts: Whether a tighter request may interrupt another one.
        headroom: Share of the promise that constant levels take on an idle machine. The rest is
            left for waiting.
        shortens: Whether ``short_prompts`` may leave out words, which a trained encoder judges.
    """

    label: str
    levels: Literal["whole", "constant", "one level", "narrowest", "planned"]
    is_scheduled: bool = False
    preempts: bool = False
    headroom: float = 1.0
    shortens: bool = False


_HEADROOMS = (0.85, 0.7, 0.5)
_BASE = {
    "fifo-whole": System("FIFO, whole model (warm: a prefix cache alone)", "whole"),
    "fifo-constant": System("FIFO, best constant levels per promise", "constant"),
    "fifo-one-level": System("FIFO, one constant level per promise (the papers')", "one level"),
    "fifo-narrowest": System("FIFO, narrowest level", "narrowest"),
    "fifo-planned": System("FIFO, planned levels", "planned"),
    "edf-whole": System("EDF, whole model", "whole", is_scheduled=True),
    "edf-constant": System("EDF, best constant levels per promise", "constant", is_scheduled=True),
    "edf-narrowest": System("EDF, narrowest level", "narrowest", is_scheduled=True),
    "edf-planned": System("EDF, planned levels", "planned", is_scheduled=True),
    "ours": System("ours", "planned", is_scheduled=True, preempts=True),
    "ours-shorter": System(
        "ours, shorter prompts", "planned", is_scheduled=True, preempts=True, shortens=True
    ),
}
SYSTEMS: Mapping[str, System] = _BASE | {
    f"{name}-{share:g}": replace(
        _BASE[name], label=f"{_BASE[name].label}, {share:g} of it used", headroom=share
    )
    for name in ("fifo-constant", "edf-constant")
    for share in _HEADROOMS
}
"""All systems by name."""
_OFFERED = (0.7, 0.5, 0.3, 0.2)
LEAST_SHARE = _OFFERED[-1]
"""Smallest share of a prompt that a system with shorter prompts may choose."""
COMPRESSED = "LG2+CS"
"""Baseline that is not served: LLMLingua-2 + contextual sparsity (see ``contextual``)."""
HALF_OF = "fifo-constant"
"""System that meets half of the requests at the rate of the study's part ``half``."""


def config_text(system: System, kind: Kind, apps: Mapping[str, str], folder: Path) -> str:
    """Return the configuration of a service, and write the apps' keys that it reads.

    A request of a system that is neither planned nor scheduled names no promise.

    Args:
        system: System.
        kind: Kind of prompts. Interrupted requests need ``kv_chunks`` even for cold ones.
        apps: Key of each app.
        folder: Folder of the service's files.
    """
    keys = folder / "keys.toml"
    keys.touch(mode=0o600)
    keys.write_text(
        "".join(f"{json.dumps(app)} = {json.dumps(key)}\n" for app, key in apps.items())
    )
    service = {
        "state_dir": str(folder / "state"),
        "key_file": str(keys),
        "max_queue": 4096,
        "max_connections": 4096,
        "client_timeout_s": 600,
        "shutdown_grace_s": 0,
    }
    plugins: dict[str, dict[str, object]] = {"recorder": {"path": str(folder / "requests.jsonl")}}
    plugins["elastic"] = {"table": "uniform"}
    if system.levels == "planned" or system.is_scheduled:
        plugins["deadlines"] = {}
        service["schedule"] = "deadline" if system.is_scheduled else "fifo"
        service["preempt"] = system.preempts
    if system.shortens:
        plugins["short_prompts"] = {"scorer": "encoder", "shares": _OFFERED}
    if kind == "warm" or system.preempts:
        plugins["kv_chunks"] = {
            "codec": "lossless",
            "ram_budget": "1 GiB",
            "disk_budget": "0 B",
            "store": str(folder / "kv"),
        }
    tables = {"service": service} | {f"plugins.{name}": table for name, table in plugins.items()}
    return 'on_error = "raise"\n' + "".join(_table(*item) for item in tables.items())


def _table(name: str, values: Mapping[str, object]) -> str:
    lines = "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items())
    return f"[{name}]\n{lines}"

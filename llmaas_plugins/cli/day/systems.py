"""Systems of the demo: vanilla, each feature alone, and all together, each with the same memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

from llmaas_hooks import ConfigError
from llmaas_plugins.cli.day.prepared import Prepared
from llmaas_plugins.cli.day.worker import Side, Usage
from llmaas_plugins.machine import available_bytes
from llmaas_plugins.process_memory import SPARE_BYTES

__all__ = ["STATES", "TOGETHER", "VANILLA", "Memory", "System", "side_of", "systems_of"]

VANILLA, STATES, TOGETHER = "vanilla", "vanilla + state files", "all together"
_ALONE: Mapping[str, tuple[str, ...]] = {
    "kv_chunks alone": ("kv_chunks",),
    "flash_weights alone": ("flash_weights",),
    "elastic + deadlines": ("elastic", "deadlines"),
    "knn_lm alone": ("knn_lm",),
}
_ARENA = 4 << 20
"""Buffer that streamed weights pass through: small, as the memory of the packaged model is."""
_LEAST_RAM = 1 << 20
_SLACK = 14 << 20
"""Memory that a process takes in its later calls."""


class System(NamedTuple):
    """A system.

    Attributes:
        name: Name, as the table shows it.
        plugins: Names of the plugins that it has.
        keeps_states: Whether it keeps contexts in state files.
    """

    name: str
    plugins: tuple[str, ...] = ()
    keeps_states: bool = False

    @property
    def keeps_contexts(self) -> bool:
        """Whether it keeps contexts that the engine does not hold."""
        return self.keeps_states or "kv_chunks" in self.plugins

    def keeps_limit(self, shared: int, n_weights: int) -> bool:
        """Return whether the process keeps a limit that leaves it ``shared`` bytes.

        Nothing but ``flash_weights`` can do with less than all weights. A system that holds the
        weights and keeps no contexts takes no more than the weights.
        """
        is_enough = n_weights <= shared
        return "flash_weights" in self.plugins or (is_enough and "kv_chunks" in self.plugins)


class Memory(NamedTuple):
    """Memory of a system.

    Attributes:
        process: Memory of the process, in bytes; None without a limit.
        beside: Bytes of ``process`` or of the page cache for contexts outside the engine.
    """

    process: int | None
    beside: int

    @classmethod
    def plenty(cls) -> Self:
        """Return all memory that the machine can give, with which nothing is streamed."""
        return cls(available_bytes(), available_bytes())

    @classmethod
    def of(cls, shared: int, n_weights: int, used: Usage | None = None) -> Self:
        """Return the memory of a process that has ``shared`` bytes for weights and contexts.

        Args:
            shared: Bytes for weights and contexts.
            n_weights: Bytes of all weights.
            used: Memory of the process without a limit; None if it cannot keep one.
        """
        beside = max(shared - n_weights, 0)
        if used is None:
            return cls(None, beside)
        rest = used.peak_bytes - used.context_bytes - n_weights
        return cls(rest + SPARE_BYTES + _SLACK + _ARENA + shared, beside)


def systems_of(left_out: Mapping[str, str]) -> list[System]:
    """Return the systems, without plugins that are left out.

    Raises:
        ConfigError: No plugin is left.
    """
    alone = [
        System(name, plugins)
        for name, plugins in _ALONE.items()
        if left_out.keys().isdisjoint(plugins)
    ]
    if not alone:
        raise ConfigError("all plugins are left out, so there is nothing to compare.")
    every = tuple(plugin for system in alone for plugin in system.plugins)
    return [System(VANILLA), System(STATES, (), True), *alone, System(TOGETHER, every)]


def side_of(
    system: System, files: Prepared, llama: dict[str, Any], folder: Path, memory: Memory
) -> Side:
    """Return a system's settings, and make the folder for its files.

    Args:
        system: The system.
        files: Model and what was made for it.
        llama: Further arguments of ``Llama``.
        folder: Folder for the folders of all systems.
        memory: Memory of the system.
    """
    own = folder / system.name.replace(" ", "-")
    own.mkdir(parents=True)
    streamed = files.packed if "flash_weights" in system.plugins else None
    return Side(
        name=system.name,
        model=files.made if set(system.plugins) - {"kv_chunks"} else files.model,
        llama=llama,
        folder=own,
        keeps_states=system.keeps_states,
        config=_config(system, files, own, memory) if system.plugins else None,
        beside=memory.beside,
        streamed=() if streamed is None else (streamed,),
    )


# -- inside --------------------------------------------------------------------------------------


def _config(system: System, files: Prepared, folder: Path, memory: Memory) -> dict[str, Any]:
    kv: dict[str, Any] = {"store": str(folder / "kv")}
    if memory.beside or memory.process is None:  # contexts do not get the process's spare memory
        kv["ram_budget"] = max(memory.beside, _LEAST_RAM)
    tables: dict[str, dict[str, Any]] = {
        "kv_chunks": kv,
        "flash_weights": {"arena": _ARENA},
        "elastic": {"table": files.table},
        "deadlines": {},
        "knn_lm": {"store": str(files.store)},
    }
    plugins = {name: tables[name] for name in system.plugins}
    budget = {} if memory.process is None else {"memory": {"budget": memory.process}}
    return {"on_error": "raise", "plugins": plugins, **budget}

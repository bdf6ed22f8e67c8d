"""Settings of the memory budget."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from llmaas_plugins.sizes import OptionalMemorySize

__all__ = ["MemoryConfig"]


class MemoryConfig(BaseModel):
    """Table ``[memory]`` of ``llmaas.toml``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    budget: OptionalMemorySize = Field(
        default=None,
        description="Memory of the whole process: a size, or a share of the memory of the machine "
        "or of the process's cgroup. It is divided among all plugins by the time that memory "
        "saves; the plugins' own budgets stay as upper limits. If unset, each plugin keeps its own "
        "budget.",
    )

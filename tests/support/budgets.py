"""Memory budgets with which flash_weights streams a small model."""

from __future__ import annotations

import contextlib
import gc
import re

from llmaas_hooks import BudgetError
from llmaas_plugins.machine import release_memory, resident_bytes

MIB = 1 << 20
ROOM = 125 * MIB
"""Enough room to load a model, and so little that flash_weights streams it."""
MORE_ROOM = 60 * MIB
"""Enough room for a context beside others."""


def make_room(flash):
    """Lower the budget so that the next model loads and is streamed."""
    needed = least(flash) * MIB + MORE_ROOM  # contexts that wait for the collector count as well
    flash.set_memory_budget(max(resident_bytes() + ROOM, needed))


def least(flash):
    """Return the least budget in MiB, the sum that a refusal gives; 0 if nothing is streamed."""
    try:
        flash.set_memory_budget(0)
    except BudgetError as error:
        process, needed = re.search(r"takes (\d+) MiB .* needs (\d+) MiB", str(error)).groups()
        return int(process) + 1 + int(needed)  # the process was rounded down
    return 0


def squeeze(flash, n_more=0):
    """Set a budget ``n_more`` MiB above the smallest possible one."""
    gc.collect()
    release_memory()  # memory that is freed later would keep weights
    for _ in range(5):
        with contextlib.suppress(BudgetError):  # the process has grown meanwhile
            flash.set_memory_budget((least(flash) + n_more) * MIB)
            return


def is_streamed(model):
    """Return whether a model in the plugin's status was read more than once and is not kept."""
    return model["kept_bytes"] < model["bytes"] < model["read_bytes"]

"""Where the tokens of named contexts are: in the engine, in RAM or on disk."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from llmaas_hooks import Engine
from llmaas_plugins.kv_chunks.store.chunk_store import ChunkStore, StoredContext
from llmaas_plugins.kv_chunks.transfer.transfer import Transfer

__all__ = ["context_places"]


def context_places(
    store: ChunkStore, engines: Iterable[tuple[Engine, Transfer]], context_ids: Iterable[str]
) -> dict[str, dict[str, dict[str, int]]]:
    """Return ``tokens`` and ``bytes`` of each known context by place.

    A token counts at the fastest place, bytes at each place where they are stored. ``cells`` are
    the running context's cells, ``parked`` those of parked contexts. Tokens that are not stored are
    in no place. Engines may compute meanwhile: the numbers are those of a moment.

    Args:
        store: Store with the contexts' chunks.
        engines: Engines, with the transfer of each.
        context_ids: Names of the contexts; unknown ones are left out.
    """
    found = ((context_id, store.stored(context_id)) for context_id in context_ids)
    engines = list(engines)
    return {name: _places(stored, engines) for name, stored in found if stored is not None}


def _places(
    stored: StoredContext, engines: list[tuple[Engine, Transfer]]
) -> dict[str, dict[str, int]]:
    n_cells = n_parked = 0
    for engine, transfer in engines:
        with contextlib.suppress(ReferenceError):  # the engine ended meanwhile
            resident = engine.resident_tokens()[: engine.n_explained]
            held = transfer.held(stored.root, stored.tokens, resident, engine.resident_app)
            n_cells, n_parked = max(n_cells, held[0]), max(n_parked, held[1])
    n_in_engine = max(n_cells, n_parked)
    in_ram, on_disk = stored.in_ram[n_in_engine:], stored.on_disk[n_in_engine:]
    n_tokens = {
        "cells": n_cells,
        "parked": n_in_engine - n_cells,
        "ram": int(in_ram.sum()),
        "disk": int((on_disk & ~in_ram).sum()),
    }
    return {"tokens": n_tokens, "bytes": {"ram": stored.ram_bytes, "disk": stored.disk_bytes}}

"""Waiting for what a suite does behind its callers' backs."""

from __future__ import annotations


def chunks_at_rest(suite):
    """The chunk store, once nothing is saved, written or read back any more."""
    suite.settle()
    plugin = suite.plugin("kv_chunks")
    plugin._workers.write.submit(int).result()
    plugin._store.flush()
    return plugin._store

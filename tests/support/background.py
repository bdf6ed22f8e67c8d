"""Waiting for the background work of a suite."""

from __future__ import annotations


def chunks_at_rest(suite):
    """Return the chunk store once no save, write or read-back is pending."""
    suite.settle()
    plugin = suite.plugin("kv_chunks")
    plugin._workers.write.submit(int).result()
    plugin._store.flush()
    return plugin._store

"""Persistent contexts, kept as 16-token KV-cache chunks (LLMS, §3).

Chunks move through three tiers: the engine's cells, encoded chunks in RAM (within a byte budget),
and a slab file on disk (within a byte budget). ``keys`` names chunks by content and ``tree`` knows
which chunks exist. ``store`` moves chunks between RAM and disk, ``transfer`` moves them between the
store and the engine, and ``plugin`` implements the hooks.
"""

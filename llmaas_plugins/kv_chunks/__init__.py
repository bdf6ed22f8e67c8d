"""Persistent contexts, kept as 16-token KV-cache chunks (LLMS, §3).

Chunks move through three tiers: the engine's cells, encoded chunks in RAM (within a byte budget),
and a slab file on disk (within a byte budget). ``store`` knows all chunks and moves them between
RAM and disk. ``compression`` chooses their bits, ``transfer`` moves them between the store and an
engine, and ``parking`` keeps contexts in spare cells. ``maintenance`` serves the commands.
``plugin`` implements the hooks.
"""

"""Persistent contexts in 16-token chunks (LLMS, §3): claimed, reclaimed, loaded, recomputed.

Tiers: engine cells → encoded chunks in RAM (byte budget) → slab file on disk (byte budget).
``keys`` names chunks by content, ``tree`` knows which exist, ``store`` moves them between the
tiers, ``transfer`` moves them between the store and the engine, ``plugin`` answers the hooks.
"""

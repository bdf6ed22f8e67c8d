"""Chunks on their way between the store and an engine: saving, loading, recompute (LLMS §3.3)."""

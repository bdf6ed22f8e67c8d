"""Inactive contexts in an engine's own cells, and the memory of those cells."""

"""Code that all stores share: complete reads and writes, private files, locks, erasure, JSON."""

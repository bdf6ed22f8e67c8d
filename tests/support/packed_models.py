"""Packed model files, shared by test workers."""

from __future__ import annotations

import fcntl

from llmaas_patches.native.packing import model_tensors, repack
from llmaas_plugins.flash_weights.packed import packed_path, write_packed


def pack(path):
    """Pack a model unless its packed file exists, and return the packed file."""
    packed = packed_path(path)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not packed.exists():
            list(write_packed(path, packed, model_tensors(path), repack))
    return packed

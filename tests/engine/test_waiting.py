"""The signal between the two native libraries that somebody waits for a read."""

from __future__ import annotations

import ctypes
from pathlib import Path

import llmaas_patches.native
import llmaas_plugins._native


def loaded(package, name):
    (path,) = (path for folder in package.__path__ for path in Path(folder).glob(name))
    return ctypes.CDLL(str(path))


def test_reads_ahead_of_each_library_give_way_to_the_other():
    core = loaded(llmaas_plugins._native, "libllmaas_core.*")
    engine = loaded(llmaas_patches.native, "libllmaas_ggml.*")
    in_core, in_engine = (
        ctypes.c_uint.in_dll(library, "llmaas_io_n_waiting") for library in (core, engine)
    )
    core.llmaas_io_begin_waiting()
    try:
        assert in_core.value == in_engine.value == 1
    finally:
        core.llmaas_io_end_waiting()
    assert in_core.value == in_engine.value == 0

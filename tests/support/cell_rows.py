"""Cells of a sequence as llama.cpp exports them, split into layers."""

from __future__ import annotations

import ctypes
import struct

import llama_cpp
import numpy as np


def exported(ctx, sequence=0):
    """Return a sequence as llama.cpp exports it."""
    size = llama_cpp.llama_state_seq_get_size(ctx, sequence)
    blob = (ctypes.c_uint8 * size)()
    assert llama_cpp.llama_state_seq_get_data(ctx, blob, size, sequence) == size
    return bytes(blob)


def imported(ctx, blob, sequence=0):
    """Replace a sequence by an exported one."""
    data = (ctypes.c_uint8 * len(blob)).from_buffer_copy(blob)
    assert llama_cpp.llama_state_seq_set_data(ctx, data, len(blob), sequence) == len(blob)


def cell_rows(blob):
    """Return the bytes of keys and of values: a list of uint8 ``(n_cells, n_bytes)`` each.

    native/include/llmaas/kv.h describes the format. Layers of a second cache follow the first's.
    """
    at, keys, values = 8, [], []

    def take(form):
        nonlocal at
        found = struct.unpack_from(form, blob, at)
        at += struct.calcsize(form)
        return found

    def rows(n, n_bytes):
        nonlocal at
        found = np.frombuffer(blob, np.uint8, n * n_bytes, at).reshape(n, n_bytes)
        at += found.size
        return found

    while at < len(blob):
        _, n_cells = take("<II")
        at += 12 * n_cells
        is_transposed, n_layers = take("<II")
        for _ in range(n_layers):
            _, n_bytes = take("<iQ")
            keys.append(rows(n_cells, n_bytes))
        for _ in range(n_layers):
            if is_transposed:
                _, n_bytes, n_values = take("<iII")
                columns = rows(n_values, n_cells * n_bytes).reshape(n_values, n_cells, n_bytes)
                values.append(columns.transpose(1, 0, 2).reshape(n_cells, -1))
            else:
                _, n_bytes = take("<iQ")
                values.append(rows(n_cells, n_bytes))
    return keys, values

"""Values that vanilla's graphs compute, read through llama.cpp's public callback."""

from __future__ import annotations

import ctypes

import numpy as np
from gguf import GGMLQuantizationType, quants
from llama_cpp import llama_cpp

_FLOATS = {0: np.dtype(np.float32), 1: np.dtype(np.float16)}


class Tensor(ctypes.Structure):
    """Structure of ggml's ``ggml_tensor``."""


Tensor._fields_ = (
    ("type", ctypes.c_int),
    ("buffer", ctypes.c_void_p),
    ("ne", ctypes.c_int64 * 4),
    ("nb", ctypes.c_size_t * 4),
    ("op", ctypes.c_int),
    ("op_params", ctypes.c_int32 * 16),
    ("flags", ctypes.c_int32),
    ("src", ctypes.POINTER(Tensor) * 10),
    ("view_src", ctypes.POINTER(Tensor)),
    ("view_offs", ctypes.c_size_t),
    ("data", ctypes.c_void_p),
    ("name", ctypes.c_char * 64),
    ("extra", ctypes.c_void_p),
    ("padding", ctypes.c_char * 8),
)


def values_of(tensor):
    """Copy a tensor's values, slowest dimension first; dequantize to floats."""
    if tensor.type in _FLOATS:
        return _bytes_of(tensor, _FLOATS[tensor.type], tensor.ne[0])
    kind = GGMLQuantizationType(tensor.type)
    length = quants.quant_shape_to_byte_shape((tensor.ne[0],), kind)[0]
    return quants.dequantize(_bytes_of(tensor, np.dtype(np.uint8), length), kind)


def _bytes_of(tensor, kind, length):
    shape = (*tuple(tensor.ne)[:0:-1], length)
    strides = (*tuple(tensor.nb)[:0:-1], kind.itemsize)
    span = sum((n - 1) * step for n, step in zip(shape, strides, strict=True)) + kind.itemsize
    memory = (ctypes.c_char * span).from_address(tensor.data)
    return np.ndarray(shape, kind, memory, strides=strides).copy()


class Watch:
    """Reader of selected graph nodes, in the order they are computed.

    Args:
        wanted: Return whether to read a ``Tensor``.
        read: Return the value to keep of a ``Tensor``.
    """

    def __init__(self, wanted, read=values_of):
        self._wanted, self._read = wanted, read
        self._seen = []
        self.settings = {"cb_eval": llama_cpp.ggml_backend_sched_eval_callback(self._call)}

    def _call(self, address, ask, _user):
        tensor = Tensor.from_address(address)
        if ask:
            return self._wanted(tensor)
        self._seen.append(self._read(tensor))
        return True

    def take(self):
        """Return the values computed since the last call, and forget them."""
        seen, self._seen[:] = list(self._seen), []
        return seen

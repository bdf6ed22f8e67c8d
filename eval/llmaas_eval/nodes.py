"""Timing single nodes of a context's graphs, inside the running model."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import llama_cpp

__all__ = ["NodeTimer"]

_EVAL_CALLBACK = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_bool, ctypes.c_void_p)


class NodeTimer:
    """Stops a context's graphs before and after some nodes, and adds up what they took.

    Nodes are named as llama.cpp's graphs name them, without the layer (``"ffn_out"``). A stop ends
    the graph's threads and starts them again: some microseconds, part of the node's time.

    Attributes:
        seconds: Of each timed node, over all layers and graphs since ``reset``.
    """

    def __init__(self, timed: Mapping[str, str]) -> None:
        """Time the keys of ``timed``; each value is the node that comes just before."""
        libraries = Path(llama_cpp.__file__).parent / "lib"
        self._name = ctypes.CDLL(str(libraries / "libggml-base.so.0")).ggml_get_name
        self._name.restype, self._name.argtypes = ctypes.c_char_p, [ctypes.c_void_p]
        self._stops = {*timed, *timed.values()}
        self._stopped = 0.0
        self.seconds = dict.fromkeys(timed, 0.0)
        self._callback = llama_cpp.ggml_backend_sched_eval_callback(self._stop)

    def attach(self, params: Any) -> None:
        """Watch the contexts created with these ``llama_context_params``; keep the timer alive."""
        params.cb_eval = self._callback

    def reset(self) -> None:
        """Start from 0."""
        self.seconds = dict.fromkeys(self.seconds, 0.0)

    def _stop(self, tensor: int, is_asked: bool, _: Any) -> bool:
        now = time.perf_counter()
        node = self._name(tensor).decode().rpartition("-")[0]
        if is_asked:
            return node in self._stops
        if node in self.seconds:
            self.seconds[node] += now - self._stopped
        self._stopped = time.perf_counter()
        return True

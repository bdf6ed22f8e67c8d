"""Timer of single nodes of a context's graphs, inside the running model."""

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
    """Timer that stops a context's graphs before and after some nodes and adds up their time.

    Node names are those of llama.cpp's graphs, without the layer (``"ffn_out"``). Each stop ends
    and restarts the graph's threads; that takes some microseconds, which count as the node's time.

    Attributes:
        seconds: Seconds of each timed node since ``reset``, over all layers and graphs.
    """

    def __init__(self, timed: Mapping[str, str]) -> None:
        """Time the nodes that are keys of ``timed``; each value is the node just before the key."""
        libraries = Path(llama_cpp.__file__).parent / "lib"
        self._name = ctypes.CDLL(str(libraries / "libggml-base.so.0")).ggml_get_name
        self._name.restype, self._name.argtypes = ctypes.c_char_p, [ctypes.c_void_p]
        self._stops = {*timed, *timed.values()}
        self._stopped = 0.0
        self.seconds = dict.fromkeys(timed, 0.0)
        self._callback = llama_cpp.ggml_backend_sched_eval_callback(self._stop)

    def attach(self, params: Any) -> None:
        """Time contexts created with these ``llama_context_params``.

        The timer must live as long as those contexts.
        """
        params.cb_eval = self._callback

    def reset(self) -> None:
        """Set all times to 0."""
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

"""Load libllmaas_ggml after llama_cpp, whose ggml it uses if it supports that ggml."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any, NamedTuple

import llama_cpp

from llmaas_hooks import IncompatibleError

__all__ = ["Library", "has_our_buffers", "include_dirs", "load_library"]

_NAME = "llmaas_patches.native._ffi"


class Library(NamedTuple):
    """The cffi module over libllmaas_ggml."""

    ffi: Any
    lib: Any


def load_library() -> Library:
    """Load and check the library.

    Raises:
        IncompatibleError: The library cannot be loaded, or the ggml of this process differs.
    """
    try:
        module = importlib.import_module(_NAME)
    except ImportError as error:
        raise _refused(str(error)) from error
    refusal = module.lib.llmaas_ggml_refusal()
    if refusal != module.ffi.NULL:
        raise _refused(module.ffi.string(refusal).decode())
    return Library(module.ffi, module.lib)


def has_our_buffers(model: int | None) -> bool:
    """Return whether the native backend, of any activation, keeps weights of a live model."""
    module = sys.modules.get(_NAME)  # without it, no activation has kept any
    if module is None:
        return False
    return bool(module.lib.llmaas_model_has_buffers(module.ffi.cast("void *", model or 0)))


def include_dirs() -> list[str]:
    """Return the include directories for ``llmaas/tap.h`` and for the ``ggml.h`` it includes.

    Raises:
        IncompatibleError: The native library is not built.
    """
    spec = importlib.util.find_spec(_NAME)
    if spec is None or spec.origin is None:
        raise IncompatibleError("llmaas_plugins is not built; install it with pip")
    package = Path(llama_cpp.__file__).parent
    return [str(Path(spec.origin).parent / "include"), str(package.parent / "include")]


def _refused(reason: str) -> IncompatibleError:
    return IncompatibleError(
        f"the engine of llama-cpp-python {llama_cpp.__version__} cannot be hooked: {reason}. "
        "Contexts stay vanilla; install a version that `llmaas doctor` names as tested."
    )

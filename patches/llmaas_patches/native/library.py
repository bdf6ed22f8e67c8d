"""Load libllmaas_ggml after llama_cpp, whose ggml it uses if it supports that ggml."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any, NamedTuple

import llama_cpp

from llmaas_hooks import IncompatibleError

__all__ = ["Library", "include_dirs", "load_library"]


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
        module = importlib.import_module("llmaas_patches.native._ffi")
    except ImportError as error:
        raise _refused(str(error)) from error
    refusal = module.lib.llmaas_ggml_refusal()
    if refusal != module.ffi.NULL:
        raise _refused(module.ffi.string(refusal).decode())
    return Library(module.ffi, module.lib)


def include_dirs() -> list[str]:
    """Return the include directories for ``llmaas/tap.h`` and for the ``ggml.h`` it includes.

    Raises:
        IncompatibleError: The native library is not built.
    """
    spec = importlib.util.find_spec("llmaas_patches.native._ffi")
    if spec is None or spec.origin is None:
        raise IncompatibleError("llmaas_plugins is not built; install it with pip")
    package = Path(llama_cpp.__file__).parent
    return [str(Path(spec.origin).parent / "include"), str(package.parent / "include")]


def _refused(reason: str) -> IncompatibleError:
    return IncompatibleError(
        f"the engine of llama-cpp-python {llama_cpp.__version__} cannot be hooked: {reason}. "
        "Contexts stay vanilla; install a version that `llmaas doctor` names as tested."
    )

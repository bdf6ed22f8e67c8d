"""Description of one build of llama.cpp as JSON; runs in a separate process.

``python -m llmaas_eval.canary.probe HOOK_FOLDER MODEL LIBRARY...``, with the libraries in the order
to load them in. Structures whose layout may have changed are passed on without access to fields.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["main"]

_SONAMES = ("libggml-base.so.0", "libggml-cpu.so.0", "libggml.so.0")
_WEIGHTS = r"blk\.\d+\.ffn_down\.weight"
_TOKENS = (1, 100, 200, 300, 400)
_OP_AT = 80
"""Offset of ``ggml_tensor.op``; its layout has not changed in three years."""
_SLOTS = 24


class _Params(ctypes.Structure):
    """Parameters of unknown layout.

    The ABI passes and returns structures of this size in memory, so a larger one does no harm.
    """

    _fields_ = (("words", ctypes.c_int32 * 256),)


class _Batch(ctypes.Structure):
    _fields_ = (("n_tokens", ctypes.c_int32), ("arrays", ctypes.c_void_p * 6))


class _Override(ctypes.Structure):
    _fields_ = (("pattern", ctypes.c_char_p), ("buft", ctypes.c_void_p))


class _Init(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_size_t),
        ("buffer", ctypes.c_void_p),
        ("no_alloc", ctypes.c_bool),
    )


def main(argv: Sequence[str]) -> int:
    """Print the facts line by line, so that a crash does not lose earlier ones."""
    hook, model, *libraries = argv
    for path in libraries[:-1]:
        ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
    built = _Build(ctypes.CDLL(libraries[-1], mode=ctypes.RTLD_GLOBAL))
    _say("versions", built.versions())
    _say("operations", built.operations())
    _say("types", built.types())
    _say("slots", built.slots())
    wanted = _imports(Path(hook) / "libllmaas_ggml.so")
    missing = [name for name in wanted if not hasattr(built.lib, name)]
    _say("missing", missing)
    if missing:
        return 0
    if not any(Path(path).name in _SONAMES for path in libraries):
        _stand_in()
    module = _load_hook(Path(hook))
    refusal = module.lib.llmaas_ggml_refusal()
    refused = None if refusal == module.ffi.NULL else module.ffi.string(refusal).decode()
    _say("refusal", refused)
    if refused is None:
        built.lib.llama_backend_init()
        _say("vanilla", _Vanilla(built.lib, model).logits())
        hooked = _Hooked(built.lib, model, module)
        module.lib.llmaas_register()
        _say("hooked", hooked.logits())
        module.lib.llmaas_unregister()
        _say("products", hooked.n_products)
        _say("left registered", bool(module.lib.llmaas_backend_registered()))
    return 0


def _say(what: str, value: object) -> None:
    print(json.dumps({what: value}), flush=True)  # noqa: T201


class _Build:
    """Facts about a build that no header declares, read from its functions and memory."""

    def __init__(self, lib: Any) -> None:
        self.lib = lib
        for name in ("ggml_version", "llama_version", "ggml_op_name", "ggml_type_name"):
            if hasattr(lib, name):
                getattr(lib, name).restype = ctypes.c_char_p

    def versions(self) -> dict[str, Any]:
        self.lib.ggml_backend_cpu_reg.restype = ctypes.POINTER(ctypes.c_int)
        found: dict[str, Any] = {"backend interface": self.lib.ggml_backend_cpu_reg()[0]}
        for name in ("ggml", "llama"):
            if hasattr(self.lib, f"{name}_version"):
                found[name] = getattr(self.lib, f"{name}_version")().decode()
        self.lib.ggml_tensor_overhead.restype = ctypes.c_size_t
        return found | {"bytes of a tensor": self.lib.ggml_tensor_overhead()}

    def operations(self) -> list[str]:
        """List operation names by number, up to ``GLU``.

        ``ggml_op_name`` does not check its argument. A new ``GLU`` tensor shows a valid number.
        """
        self.lib.ggml_init.restype, self.lib.ggml_init.argtypes = ctypes.c_void_p, [_Init]
        context = ctypes.c_void_p(self.lib.ggml_init(_Init(1 << 20, None, True)))
        make, glu = self.lib.ggml_new_tensor_1d, self.lib.ggml_swiglu
        make.restype = glu.restype = ctypes.c_void_p
        made = glu(context, ctypes.c_void_p(make(context, 0, ctypes.c_int64(8))))
        last = ctypes.c_int32.from_address(made + _OP_AT).value
        self.lib.ggml_free(context)
        return [self.lib.ggml_op_name(i).decode() for i in range(min(last, 255) + 1)]

    def types(self) -> list[str]:
        return [(self.lib.ggml_type_name(i) or b"-").decode() for i in range(40)]

    def slots(self) -> dict[str, int]:
        """Count pointers in each structure before a member that a ggml function also returns."""
        cpu = self._call("ggml_backend_cpu_init")
        device = self._call("ggml_backend_get_device", cpu)
        kind = self._call("ggml_backend_cpu_buffer_type")
        buffer = self._call("ggml_backend_buft_alloc_buffer", kind, 192)
        registry = self._call("ggml_backend_dev_backend_reg", device)
        return {
            "backend": _place(cpu, device),
            "buffer": _place(buffer, kind),
            "device": _place(device, registry),
        }

    def _call(self, name: str, *arguments: int) -> int:
        function = getattr(self.lib, name)
        function.restype = ctypes.c_void_p
        return int(function(*map(ctypes.c_void_p, arguments)))


def _place(structure: int, member: int) -> int:
    words = (ctypes.c_void_p * _SLOTS).from_address(structure)
    return next((i for i, word in enumerate(words) if word == member), -1)


def _imports(library: Path) -> list[str]:
    """List the ggml functions that our library imports."""
    command = ["readelf", "--wide", "--dyn-syms", str(library)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout  # noqa: S603
    return sorted(set(re.findall(r" UND ((?:ggml|gguf|quantize|dequantize|iq)\w+)", said)))


def _stand_in() -> None:
    """Load empty libraries with ggml's names.

    The empty libraries satisfy our library's dependencies. The loader then finds the symbols that
    our library imports in the whole process.
    """
    folder = Path(tempfile.mkdtemp(prefix="llmaas-canary-"))
    for name in _SONAMES:
        path = folder / name
        flags = ["-shared", "-nostdlib", f"-Wl,-soname,{name}", "-x", "c", "/dev/null"]
        subprocess.run(["cc", *flags, "-o", str(path)], check=True)  # noqa: S603, S607
        ctypes.CDLL(str(path))
        path.unlink()
    folder.rmdir()


def _load_hook(folder: Path) -> Any:
    """Load the cffi module without its package, which would load llama-cpp-python."""
    path = next(folder.glob("_ffi*.so"))
    spec = importlib.util.spec_from_file_location("_ffi", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no module")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class _Vanilla:
    """A model without the engine."""

    def __init__(self, lib: Any, path: str) -> None:
        self._lib, self._path = lib, path.encode()
        pointer = ctypes.c_void_p
        for name, result, arguments in (
            ("llama_model_default_params", _Params, []),
            ("llama_context_default_params", _Params, []),
            ("llama_model_load_from_file", pointer, [ctypes.c_char_p, _Params]),
            ("llama_init_from_model", pointer, [pointer, _Params]),
            ("llama_batch_get_one", _Batch, [pointer, ctypes.c_int32]),
            ("llama_decode", ctypes.c_int32, [pointer, _Batch]),
            ("llama_get_logits_ith", pointer, [pointer, ctypes.c_int32]),
            ("llama_model_get_vocab", pointer, [pointer]),
            ("llama_vocab_n_tokens", ctypes.c_int32, [pointer]),
            ("llama_free", None, [pointer]),
            ("llama_model_free", None, [pointer]),
        ):
            function = getattr(lib, name)
            function.restype, function.argtypes = result, arguments

    def logits(self) -> str:
        """Return a digest of the logits after a few tokens."""
        lib = self._lib
        model = self.load(lib.llama_model_default_params())
        ctx = self.create(model, _flash_attention(lib.llama_context_default_params()))
        tokens = (ctypes.c_int32 * len(_TOKENS))(*_TOKENS)
        status = lib.llama_decode(ctx, lib.llama_batch_get_one(tokens, len(tokens)))
        if status != 0:
            raise RuntimeError(f"llama_decode returned {status}")
        n_vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
        found = ctypes.string_at(lib.llama_get_logits_ith(ctx, -1), 4 * n_vocab)
        self.decoded()
        lib.llama_free(ctx)
        lib.llama_model_free(model)
        return hashlib.sha256(found).hexdigest()

    def load(self, params: _Params) -> Any:
        return self._lib.llama_model_load_from_file(self._path, params)

    def create(self, model: Any, params: _Params) -> Any:
        return self._lib.llama_init_from_model(model, params)

    def decoded(self) -> None:
        """Do nothing; a subclass reads the engine's statistics before the context is freed."""


class _Hooked(_Vanilla):
    """A model with some weights in our buffers, which the engine reads from the file per graph."""

    def __init__(self, lib: Any, path: str, module: Any) -> None:
        super().__init__(lib, path)
        self._ffi, self._hook = module.ffi, module.lib
        self._weights = self._hook.llmaas_weights_new()
        self._engine: Any = None
        self.n_products = 0

    def load(self, params: _Params) -> Any:
        infos, n = self._ffi.new("llmaas_tensor_info **"), self._ffi.new("uint32_t *")
        self._hook.llmaas_gguf_tensors(self._path, infos, n)
        for info in infos[0][0 : n[0]]:
            if re.fullmatch(_WEIGHTS, self._ffi.string(info.name).decode()):
                at = self._path, info.offset, False
                self._hook.llmaas_weights_claim_file(self._weights, info.name, *at)
        buft = int(self._ffi.cast("uintptr_t", self._hook.llmaas_buffer_type()))
        overrides = (_Override * 2)(_Override(_WEIGHTS.replace(r"\d", "[0-9]").encode(), buft))
        pointers = ctypes.cast(params.words, ctypes.POINTER(ctypes.c_void_p))
        pointers[1] = ctypes.addressof(overrides)  # the field after ``devices``
        self._hook.llmaas_load_begin(self._weights)
        model = super().load(params)
        self._hook.llmaas_load_end(self._ffi.cast("void *", int(model or 0)))
        self._check(is_created=False)
        self._hook.llmaas_weights_set_memory(self._weights, 0, 1 << 20)
        return model

    def create(self, model: Any, params: _Params) -> Any:
        self._hook.llmaas_create_begin(self._weights)
        ctx = super().create(model, params)
        self._engine = self._hook.llmaas_create_end()
        self._check(is_created=True)
        return ctx

    def decoded(self) -> None:
        stats = self._ffi.new("llmaas_engine_stats *")
        self._hook.llmaas_engine_read_stats(self._engine, stats)
        self.n_products = int(stats.n_products)

    def _check(self, *, is_created: bool) -> None:
        problem = self._hook.llmaas_weights_problem(self._weights, is_created)
        if problem != self._ffi.NULL:
            raise RuntimeError(self._ffi.string(problem).decode())


def _flash_attention(params: _Params) -> _Params:
    """Switch flash attention on.

    By default, llama.cpp uses no flash attention if weights lie in buffers that are not its own.
    The field is the last of four adjacent settings whose default is -1.
    """
    words = list(params.words)
    runs = [i for i in range(len(words) - 3) if words[i : i + 4] == [-1] * 4]
    if len(runs) == 1:
        params.words[runs[0] + 3] = 1
    return params


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

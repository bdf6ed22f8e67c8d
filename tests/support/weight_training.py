"""Training of a model in memory through llama.cpp's own functions."""

from __future__ import annotations

import ctypes
from pathlib import Path

import llama_cpp

_I32 = 26
_OPTIMIZER = "ggml_opt_get_default_optimizer_params"


@llama_cpp.llama_opt_param_filter
def _all_weights(_tensor, _user):
    return True


def train(model, tokens):
    """Train all weights of a loaded model in a context of its own.

    Args:
        model: Address of a model with F32 weights that are not mapped from its file.
        tokens: Text, one token more than a context.
    """
    ggml = ctypes.CDLL(next((Path(llama_cpp.__file__).parent / "lib").glob("libggml-base.so*")))
    for name in ("opt_dataset_init", "opt_dataset_data", "opt_dataset_labels", "opt_result_init"):
        getattr(ggml, f"ggml_{name}").restype = ctypes.c_void_p
    ggml.ggml_get_data.restype = ctypes.c_void_p
    n = len(tokens) - 1
    sizes = map(ctypes.c_int64, (n, n, 1, 1))
    dataset = ctypes.c_void_p(ggml.ggml_opt_dataset_init(_I32, _I32, *sizes))
    for start, part in enumerate((ggml.ggml_opt_dataset_data, ggml.ggml_opt_dataset_labels)):
        at = ggml.ggml_get_data(ctypes.c_void_p(part(dataset)))
        (ctypes.c_int32 * n).from_address(at)[:] = tokens[start : start + n]
    results = [ctypes.c_void_p(ggml.ggml_opt_result_init()) for _ in range(2)]
    ctx = llama_cpp.llama_init_from_model(model, _settings(n))
    params = llama_cpp.llama_opt_params(param_filter=_all_weights)
    params.get_opt_pars = ctypes.cast(getattr(ggml, _OPTIMIZER), ctypes.c_void_p)
    llama_cpp.llama_opt_init(ctx, model, params)
    llama_cpp.llama_opt_epoch(ctx, dataset, *results, 1, None, None)
    llama_cpp.llama_free(ctx)
    ggml.ggml_opt_dataset_free(dataset)
    for result in results:
        ggml.ggml_opt_result_free(result)


def _settings(n):
    settings = llama_cpp.llama_context_default_params()
    settings.n_ctx = settings.n_batch = settings.n_ubatch = n
    settings.type_k = settings.type_v = llama_cpp.GGML_TYPE_F32
    settings.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
    settings.n_threads = settings.n_threads_batch = 1
    return settings

"""A plugin that claims weights, models with zeroed parts, and logits through the C API."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import re
import shutil

import llama_cpp
import numpy as np
from gguf import GGUFReader
from gguf.constants import GGML_QUANT_SIZES

from llmaas_hooks import hookimpl

TOKENS = tuple(range(5, 42))


class Claimer:
    """Claims what it is given, and keeps the contexts it is told of."""

    def __init__(self, *claims):
        self.claims = claims
        self.contexts = []

    @hookimpl
    def llmaas_weights(self, load):
        del load
        return list(self.claims)

    @hookimpl
    def llmaas_native_context(self, context):
        self.contexts.append(context)


def native(on_error="raise", /, **plugins):
    """Activate with these plugins and no others."""
    from llmaas_plugins import activate

    return activate({"plugins": {}, "on_error": on_error}, plugins)


@contextlib.contextmanager
def loaded(path, **settings):
    """A model; None if it cannot be loaded."""
    params = model_params(**settings)
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
    try:
        yield model
    finally:
        if model is not None:
            llama_cpp.llama_model_free(model)


def model_params(**settings):
    return edited(llama_cpp.llama_model_default_params(), settings)


def edited(params, settings):
    """Parameters with settings in them; a structure takes any other attribute, too."""
    for name, value in settings.items():
        assert hasattr(params, name), name
        setattr(params, name, value)
    return params


@contextlib.contextmanager
def created(model, **settings):
    """A context; None if it cannot be created."""
    settings = {"n_ctx": 128, "n_threads": 1, "n_threads_batch": 1} | settings
    params = edited(llama_cpp.llama_context_default_params(), settings)
    ctx = llama_cpp.llama_init_from_model(model, params)
    try:
        yield ctx
    finally:
        if ctx is not None:
            llama_cpp.llama_free(ctx)


@contextlib.contextmanager
def opened(path, **settings):
    """A context on a model of its own."""
    with loaded(path, **settings) as model, created(model) as ctx:
        yield ctx


def decode(ctx, tokens, start):
    """What ``llama_decode`` returns for tokens at positions from ``start``, all with logits."""
    batch = llama_cpp.llama_batch_init(len(tokens), 0, 1)
    batch.n_tokens = len(tokens)
    for i, token in enumerate(tokens):
        batch.token[i], batch.pos[i] = token, start + i
        batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
        batch.logits[i] = 1
    try:
        return llama_cpp.llama_decode(ctx, batch)
    finally:
        llama_cpp.llama_batch_free(batch)


def evaluate(ctx):
    """Logits of TOKENS from an empty memory: a batch of most of them, then one by one."""
    llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(ctx), True)
    n_vocab = llama_cpp.llama_vocab_n_tokens(
        llama_cpp.llama_model_get_vocab(llama_cpp.llama_get_model(ctx))
    )
    parts = [TOKENS[:-2], TOKENS[-2:-1], TOKENS[-1:]]
    found, start = [], 0
    for part in parts:
        assert decode(ctx, part, start) == 0
        rows = llama_cpp.llama_get_logits(ctx)
        found.append(np.ctypeslib.as_array(rows, (len(part), n_vocab)).copy())
        start += len(part)
    return np.concatenate(found)


def vanilla(path, **settings):
    """Logits of the model at ``path``, without us."""
    with opened(path, **settings) as ctx:
        return evaluate(ctx)


def claimed(path, *claims, level=0, **settings):
    """Logits of the model at ``path`` with these weights claimed."""
    plugin = Claimer(*claims)
    with native(plugin=plugin), opened(path, **settings) as ctx:
        plugin.contexts[0].level = level
        found = evaluate(ctx)
        if claims:
            assert plugin.contexts[0].stats()["products"] > 0 or level < 0
        return found


@functools.cache
def places(path):
    """Name, type, NumPy's type and shape, and offset of each tensor; reading them takes a while."""
    return [
        (each.name, each.tensor_type, each.data.dtype, each.data.shape, int(each.data_offset))
        for each in GGUFReader(path).tensors
    ]


def zeroed(path, copy, pattern, *, rows=None, columns=None):
    """A copy of a model in which only these rows or columns of some weights are not zero."""
    shutil.copyfile(path, copy)
    found = [place for place in places(path) if re.fullmatch(pattern, place[0])]
    assert found
    for _, kind, dtype, shape, offset in found:
        data = np.memmap(copy, dtype, "r+", offset, shape)
        block, size = GGML_QUANT_SIZES[kind]
        if rows is not None:  # bytes of zero are zeros in every type
            data[..., rows:, :] = 0
        else:
            assert columns % block == 0
            data[..., columns // block * size // data.itemsize :] = 0
    return copy


def add_adapter(model, ctx, path):
    """Apply a LoRA adapter in full."""
    adapter = llama_cpp.llama_adapter_lora_init(model, str(path).encode())
    adapters = (llama_cpp.llama_adapter_lora_p_ctypes * 1)(adapter)
    assert llama_cpp.llama_set_adapters_lora(ctx, adapters, 1, (ctypes.c_float * 1)(1)) == 0

"""A plugin that claims weights and logits through the C API."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import sys
from pathlib import Path

import fork_server
import llama_cpp
import numpy as np
from soak import scale

from llmaas_hooks import hookimpl

OFF, ON = 0, 1
Q8_0 = llama_cpp.GGML_TYPE_Q8_0
CELLS = {
    "transposed": {"flash_attn_type": OFF},
    "flash attention": {"flash_attn_type": ON},
    "q8_0": {"flash_attn_type": ON, "type_k": Q8_0, "type_v": Q8_0},
}
"""Context settings by the kind of KV cells they make."""


class Claimer:
    """Plugin that claims the given weights and records the contexts it is told about."""

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
    """Activate these plugins and no others inside the block."""
    from llmaas_plugins import activate

    return activate({"plugins": {}, "on_error": on_error}, plugins)


@contextlib.contextmanager
def loaded(path, **settings):
    """Load a model; yield None if it cannot be loaded."""
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
    """Set existing attributes of a parameter structure and return the structure."""
    for name, value in settings.items():
        assert hasattr(params, name), name
        setattr(params, name, value)
    return params


@contextlib.contextmanager
def created(model, **settings):
    """Create a context; yield None if it cannot be created."""
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
    """Open a context on a model of its own."""
    with loaded(path, **settings) as model, created(model) as ctx:
        yield ctx


def decode(ctx, tokens, start, n_outputs=None):
    """Return the result of ``llama_decode`` for tokens from ``start`` on."""
    batch = llama_cpp.llama_batch_init(len(tokens), 0, 1)
    batch.n_tokens = len(tokens)
    for i, token in enumerate(tokens):
        batch.token[i], batch.pos[i] = token, start + i
        batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
        batch.logits[i] = n_outputs is None or i >= len(tokens) - n_outputs
    try:
        return llama_cpp.llama_decode(ctx, batch)
    finally:
        llama_cpp.llama_batch_free(batch)


def step(ctx, tokens, start, n_outputs=None):
    """Return the logits of a batch: one row for each token, or for the last ``n_outputs`` ones."""
    assert decode(ctx, tokens, start, n_outputs) == 0
    vocab = llama_cpp.llama_model_get_vocab(llama_cpp.llama_get_model(ctx))
    shape = n_outputs or len(tokens), llama_cpp.llama_vocab_n_tokens(vocab)
    return np.ctypeslib.as_array(llama_cpp.llama_get_logits(ctx), shape).copy()


def evaluate(ctx):
    """Return logits computed from an empty memory: first a large batch, then single tokens."""
    llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(ctx), True)
    batches = (range(5, 40), 0), ([40], 35), ([41], 36)
    return np.concatenate([step(ctx, tokens, start) for tokens, start in batches])


def hand_over(source, target):
    """Copy one context's cells into another."""
    size = llama_cpp.llama_state_seq_get_size(source, 0)
    cells = (ctypes.c_uint8 * size)()
    assert llama_cpp.llama_state_seq_get_data(source, cells, size, 0) == size
    assert llama_cpp.llama_state_seq_set_data(target, cells, size, 0) == size


def add_adapter(model, ctx, path):
    """Apply a LoRA adapter at full scale."""
    adapter = llama_cpp.llama_adapter_lora_init(model, str(path).encode())
    adapters = (llama_cpp.llama_adapter_lora_p_ctypes * 1)(adapter)
    assert llama_cpp.llama_set_adapters_lora(ctx, adapters, 1, (ctypes.c_float * 1)(1)) == 0


def vanilla(path, **settings):
    """Return the logits of the model at ``path`` in stock llama.cpp."""
    with opened(path, **settings) as ctx:
        return evaluate(ctx)


@functools.cache
def vanilla_once(path, **settings):
    """Return what ``vanilla`` returns for a model that no test changes."""
    return vanilla(path, **settings)


def claimed(path, *claims, level=0, **settings):
    """Return the logits of the model at ``path`` with these weights claimed."""
    plugin = Claimer(*claims)
    with native(plugin=plugin), opened(path, **settings) as ctx:
        plugin.contexts[0].level = level
        found = evaluate(ctx)
        if claims:
            assert plugin.contexts[0].stats()["products"] > 0 or level < 0
        return found


def n_engines():
    """Return the number of live engines."""
    from llmaas_patches.native import load_library

    return load_library().lib.llmaas_engine_count()


def in_a_process(script, *arguments, start=fork_server.run, **environ):
    """Run a script that may import this module in a process of its own, because it may crash.

    The process is forked. With ``start=subprocess.run`` it is an interpreter of its own.
    """
    return start(
        [sys.executable, "-c", script, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parent)} | environ,
        capture_output=True,
        text=True,
        timeout=scale(60, 600),
        check=False,
    )

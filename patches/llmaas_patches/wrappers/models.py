"""Wrappers of the C bindings that load and free models and adapters."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

from llmaas_hooks import ConfigError, ModelLoad
from llmaas_hooks.own_models import are_loaded_here
from llmaas_patches.cell_tracker import address
from llmaas_patches.host import Host
from llmaas_patches.loading import look_again, look_at, model_load
from llmaas_patches.native.claims import split_paths

__all__ = ["wrap_free_model", "wrap_load_adapter", "wrap_load_model", "wrap_load_splits"]

Function = Callable[..., Any]


def wrap_load_model(host: Host, original: Function) -> Function:
    """Wrap ``llama_model_load_from_file``: let plugins edit the path and the parameters."""

    @functools.wraps(original)
    def llama_model_load_from_file(path_model: Any, params: Any) -> Any:
        if are_loaded_here():
            return original(path_model, params)
        named = os.fsdecode(path_model)
        with host.log_buffer.capture():
            path = host.hooks.model_path(named)
        load = ModelLoad(
            path,
            params,
            look_at(split_paths(path)),
            in_place_of=None if path == named else named,
        )
        return _load(host, load, None, lambda params: original(os.fsencode(path), params))

    return llama_model_load_from_file


def wrap_load_splits(host: Host, original: Function) -> Function:
    """Wrap ``llama_model_load_from_splits``: let plugins edit the parameters.

    The path of the first file names the model.
    """

    @functools.wraps(original)
    def llama_model_load_from_splits(paths: Any, n_paths: Any, params: Any) -> Any:
        files = [os.fsdecode(paths[i]) for i in range(n_paths)]
        load = ModelLoad(files[0], params, look_at(files))
        return _load(host, load, files, functools.partial(original, paths, n_paths))

    return llama_model_load_from_splits


def _load(
    host: Host, load: ModelLoad, files: list[str] | None, original: Callable[[Any], Any]
) -> Any:
    params = load.params
    host.lifetimes.settle()
    with host.log_buffer.capture():
        host.hooks.model_load(load)
        if host.native is None:
            model = original(params)
        else:
            model = host.native.load(load, files or split_paths(load.path), original)
    if model is not None:
        is_claimed = host.native is not None and host.native.has_claims(int(model))
        host.loads[int(model)] = model_load(
            load, int(model), is_listed=files is not None, is_claimed=is_claimed
        )
    return model


def wrap_free_model(host: Host, original: Function) -> Function:
    """Wrap ``llama_model_free``: free a model only after its contexts."""

    @functools.wraps(original)
    def llama_model_free(model: Any) -> None:
        if not address(model):
            original(model)
            return
        host.free_model(address(model), functools.partial(original, model))

    return llama_model_free


def wrap_load_adapter(host: Host, original: Function) -> Function:
    """Wrap ``llama_adapter_lora_init``: record the adapter's file."""

    @functools.wraps(original)
    def llama_adapter_lora_init(model: Any, path_lora: Any) -> Any:
        files = look_at([os.fsdecode(path_lora)])
        load = host.loads.get(address(model))
        _refuse_replaced(load, files[0].path)
        adapter = original(model, path_lora)
        if adapter is not None and load is not None:
            load.adapters.extend(look_again(files))
        return adapter

    return llama_adapter_lora_init


def _refuse_replaced(load: ModelLoad | None, adapter: str) -> None:
    if load is None or load.in_place_of is None:
        return
    raise ConfigError(
        f"{load.path} was loaded in place of {load.in_place_of}, for which the adapter {adapter} "
        "was made: its weights may be in another order. Remove the model from the table [models] "
        "in llmaas.toml, or load the adapter's own model."
    )

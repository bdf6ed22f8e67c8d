"""Table of all patches."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from llmaas_patches.cell_tracker import address
from llmaas_patches.host import Host
from llmaas_patches.patcher import Patch
from llmaas_patches.wrappers.cells import (
    Around,
    Change,
    around_everything,
    wrap_altering,
    wrap_changing,
    wrap_eval,
    wrap_load_state,
    wrap_replacing,
    wrap_reset,
    wrap_save_state,
    wrap_settled,
    wrap_shown,
    wrap_whole,
)
from llmaas_patches.wrappers.computation import wrap_training, wrap_warmup
from llmaas_patches.wrappers.contexts import (
    wrap_free,
    wrap_init_context,
    wrap_n_ctx,
    wrap_n_seq_max,
)
from llmaas_patches.wrappers.decoding import wrap_decode, wrap_process, wrap_sample
from llmaas_patches.wrappers.hidden import (
    around_clear,
    around_keep,
    around_load,
    around_named,
    around_remove,
)
from llmaas_patches.wrappers.models import (
    wrap_free_model,
    wrap_load_adapter,
    wrap_load_model,
    wrap_load_splits,
)
from llmaas_patches.wrappers.outputs import wrap_get_logits, wrap_set_batch
from llmaas_patches.wrappers.requests import wrap_create_completion, wrap_generate

__all__ = ["PATCHES"]

Wrap = Callable[[Host, Callable[..., Any]], Callable[..., Any]]

_BINDINGS = "llama_cpp.llama_cpp"

# Calls that ask which positions a sequence has. They wait for deferred work.
_SETTLED: dict[str, tuple[str, ...]] = {
    "llama_memory_seq_pos_min": ("mem",),
    "llama_memory_seq_pos_max": ("mem",),
}

# Calls that read a sequence's cells. They wait for deferred work, so that an app never sees a
# plugin's scratch sequence or a half-copied state.
_SHOWN: dict[str, tuple[str, ...]] = {
    "llama_state_seq_get_size": ("ctx",),
    "llama_state_seq_get_data": ("ctx",),
    "llama_state_seq_save_file": ("ctx",),
    "llama_state_seq_get_size_ext": ("ctx",),
    "llama_state_seq_get_data_ext": ("ctx",),
}

# Calls that read all cells. They wait for deferred work and remove plugins' sequences first.
_WHOLE: dict[str, tuple[str, ...]] = {
    "llama_state_get_size": ("ctx",),
    "llama_state_get_data": ("ctx",),
    "llama_state_save_file": ("ctx",),
    "llama_get_state_size": ("ctx",),
    "llama_copy_state_data": ("ctx",),
    "llama_save_session_file": ("ctx",),
}


def _everything(*_: Any) -> int:
    return 0


def _range(sequence: Any, start: Any, *_: Any) -> int | None:
    return int(address(start)) if address(sequence) in {-1, 0} else None


def _copy(_source: Any, target: Any, start: Any, *_: Any) -> int | None:
    return int(address(start)) if address(target) == 0 else None


def _keep(sequence: Any) -> int | None:
    return None if address(sequence) == 0 else 0


def _load(_data: Any, _size: Any, target: Any, *_: Any) -> int | None:
    return 0 if address(target) == 0 else None


def _load_file(_path: Any, target: Any, *_: Any) -> int | None:
    return 0 if address(target) == 0 else None


# Calls that change cells. They wait for deferred work, and record the first changed position of
# sequence 0.
_CHANGING: dict[str, tuple[tuple[str, ...], Change, Around]] = {
    "llama_memory_clear": (("mem",), _everything, around_clear),
    "llama_memory_seq_rm": (("mem", "seq_id", "p0"), _range, around_remove),
    "llama_memory_seq_cp": (
        ("mem", "seq_id_src", "seq_id_dst", "p0"),
        _copy,
        around_named(1, 2),
    ),
    "llama_memory_seq_keep": (("mem", "seq_id"), _keep, around_keep),
    "llama_memory_seq_add": (("mem", "seq_id", "p0"), _range, around_everything),
    "llama_memory_seq_div": (("mem", "seq_id", "p0"), _range, around_everything),
    "llama_state_seq_set_data": (
        ("ctx", "src", "size", "dest_seq_id"),
        _load,
        around_load(3),
    ),
    "llama_state_seq_set_data_ext": (
        ("ctx", "src", "size", "dest_seq_id"),
        _load,
        around_load(3),
    ),
    "llama_state_seq_load_file": (
        ("ctx", "filepath", "dest_seq_id"),
        _load_file,
        around_load(2),
    ),
}

# Calls that replace all cells.
_REPLACING: dict[str, tuple[str, ...]] = {
    "llama_state_set_data": ("ctx",),
    "llama_set_state_data": ("ctx",),
    "llama_state_load_file": ("ctx",),
    "llama_load_session_file": ("ctx",),
}

# Calls that change how a context computes its cells.
_ALTERING = {
    "llama_set_adapters_lora": ("ctx",),
    "llama_set_adapter_cvec": ("ctx",),
    "llama_set_causal_attn": ("ctx",),
}

_OWN = {
    "llama_model_load_from_file": (("path_model", "params"), wrap_load_model),
    "llama_load_model_from_file": (("path_model", "params"), wrap_load_model),
    "llama_model_load_from_splits": (("paths", "n_paths", "params"), wrap_load_splits),
    "llama_adapter_lora_init": (("model", "path_lora"), wrap_load_adapter),
    "llama_model_free": (("model",), wrap_free_model),
    "llama_free_model": (("model",), wrap_free_model),
    "llama_init_from_model": (("model", "params"), wrap_init_context),
    "llama_new_context_with_model": (("model", "params"), wrap_init_context),
    "llama_decode": (("ctx", "batch"), wrap_decode),
    "llama_encode": (("ctx",), wrap_process),
    "llama_process": (("ctx",), wrap_process),
    "llama_free": (("ctx",), wrap_free),
    "llama_n_ctx": (("ctx",), wrap_n_ctx),
    "llama_n_ctx_seq": (("ctx",), wrap_n_ctx),
    "llama_n_seq_max": (("ctx",), wrap_n_seq_max),
    "llama_get_logits": (("ctx",), wrap_get_logits),
    "llama_set_warmup": (("ctx", "warmup"), wrap_warmup),
    "llama_opt_epoch": (("lctx",), wrap_training),
    "llama_sampler_sample": (("smpl", "ctx", "idx"), wrap_sample),
}


# Bindings that are missing in the oldest supported releases, and the release that added them.
_SINCE = {"llama_process": "0.3.36"}


def _binding(name: str, parameters: tuple[str, ...], wrap: Wrap) -> Patch:
    target, other = f"{_BINDINGS}:{name}", f"llama_cpp:{name}"
    return Patch(target, parameters, wrap, also=(other,), since=_SINCE.get(name, "0"))


PATCHES: tuple[Patch, ...] = (
    *(_binding(name, parameters, wrap) for name, (parameters, wrap) in _OWN.items()),
    *(_binding(name, parameters, wrap_settled) for name, parameters in _SETTLED.items()),
    *(
        _binding(name, parameters, functools.partial(wrap_changing, change=change, around=around))
        for name, (parameters, change, around) in _CHANGING.items()
    ),
    *(_binding(name, parameters, wrap_whole) for name, parameters in _WHOLE.items()),
    *(_binding(name, parameters, wrap_shown) for name, parameters in _SHOWN.items()),
    *(_binding(name, parameters, wrap_replacing) for name, parameters in _REPLACING.items()),
    *(_binding(name, parameters, wrap_altering) for name, parameters in _ALTERING.items()),
    Patch("llama_cpp.llama:Llama.generate", ("self", "tokens"), wrap_generate),
    Patch("llama_cpp.llama:Llama._create_completion", ("self", "prompt"), wrap_create_completion),
    Patch(
        "llama_cpp._internals:LlamaBatch.set_batch",
        ("self", "batch", "n_past", "logits_all"),
        wrap_set_batch,
    ),
    Patch("llama_cpp.llama:Llama.eval", ("self", "tokens"), wrap_eval),
    Patch("llama_cpp.llama:Llama.reset", ("self",), wrap_reset),
    Patch("llama_cpp.llama:Llama.save_state", ("self",), wrap_save_state),
    Patch("llama_cpp.llama:Llama.load_state", ("self", "state"), wrap_load_state),
)

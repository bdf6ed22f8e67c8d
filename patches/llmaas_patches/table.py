"""Every interception, as data."""

from __future__ import annotations

from llmaas_patches.calls import (
    wrap_decode,
    wrap_free,
    wrap_init_context,
    wrap_load_model,
    wrap_n_seq_max,
    wrap_sample,
    wrap_seq_rm,
    wrap_seq_shift,
    wrap_settled,
)
from llmaas_patches.patcher import Patch
from llmaas_patches.requests import wrap_create_completion, wrap_generate

__all__ = ["PATCHES"]

_BINDINGS = "llama_cpp.llama_cpp"

# Calls that read or change a context's cells: they wait for deferred work, so that an app never
# sees our scratch sequence nor a half-copied state.
_SETTLED: dict[str, tuple[str, ...]] = {
    "llama_memory_clear": ("mem",),
    "llama_memory_seq_cp": ("mem",),
    "llama_memory_seq_keep": ("mem",),
    "llama_memory_seq_pos_min": ("mem",),
    "llama_memory_seq_pos_max": ("mem",),
    "llama_state_get_size": ("ctx",),
    "llama_state_get_data": ("ctx",),
    "llama_state_set_data": ("ctx",),
    "llama_state_load_file": ("ctx",),
    "llama_state_save_file": ("ctx",),
    "llama_state_seq_get_size": ("ctx",),
    "llama_state_seq_get_data": ("ctx",),
    "llama_state_seq_set_data": ("ctx",),
    "llama_state_seq_save_file": ("ctx",),
    "llama_state_seq_load_file": ("ctx",),
    "llama_state_seq_get_size_ext": ("ctx",),
    "llama_state_seq_get_data_ext": ("ctx",),
    "llama_state_seq_set_data_ext": ("ctx",),
    "llama_set_adapters_lora": ("ctx",),
    "llama_encode": ("ctx",),
    "llama_process": ("ctx",),
}

_OWN = {
    "llama_model_load_from_file": (("path_model", "params"), wrap_load_model),
    "llama_init_from_model": (("model", "params"), wrap_init_context),
    "llama_decode": (("ctx", "batch"), wrap_decode),
    "llama_free": (("ctx",), wrap_free),
    "llama_memory_seq_rm": (("mem", "seq_id", "p0", "p1"), wrap_seq_rm),
    "llama_memory_seq_add": (("mem",), wrap_seq_shift),
    "llama_memory_seq_div": (("mem",), wrap_seq_shift),
    "llama_n_seq_max": (("ctx",), wrap_n_seq_max),
    "llama_sampler_sample": (("smpl", "ctx", "idx"), wrap_sample),
}


def _binding(name: str, parameters: tuple[str, ...], wrap: object) -> Patch:
    target = f"{_BINDINGS}:{name}"
    return Patch(target, parameters, wrap, also=(f"llama_cpp:{name}",))  # type: ignore[arg-type]


PATCHES: tuple[Patch, ...] = (
    *(_binding(name, parameters, wrap) for name, (parameters, wrap) in _OWN.items()),
    *(_binding(name, parameters, wrap_settled) for name, parameters in _SETTLED.items()),
    Patch("llama_cpp.llama:Llama.generate", ("self", "tokens"), wrap_generate),
    Patch("llama_cpp.llama:Llama._create_completion", ("self", "prompt"), wrap_create_completion),
)

"""Which model this is, and how it is used, found without reading all of its file."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import Any

__all__ = ["file_digest", "model_identity"]

_EDGE_BYTES = 1 << 20
_N_SAMPLES = 64
_SAMPLE_BYTES = 4096
_CONTEXT_FIELDS = (
    "rope_scaling_type",
    "rope_freq_base",
    "rope_freq_scale",
    "yarn_ext_factor",
    "yarn_attn_factor",
    "yarn_beta_fast",
    "yarn_beta_slow",
    "yarn_orig_ctx",
)


def model_identity(llama: Any) -> dict[str, Any]:
    """What decides the hidden states of ``llama`` (a ``llama_cpp.Llama``), as JSON's types.

    Its file, what overrides the metadata, its adapter, and RoPE's settings.
    """
    return {
        "model": file_digest(llama.model_path),
        "kv_overrides": repr(llama.kv_overrides),
        "lora": file_digest(llama.lora_path) if llama.lora_path else None,
        "lora_scale": llama.lora_scale if llama.lora_path else None,
        **{name: getattr(llama.context_params, name) for name in _CONTEXT_FIELDS},
    }


def file_digest(path: str) -> str:
    """Name a model or adapter by its bytes; a file of gigabytes takes milliseconds."""
    stat = Path(path).stat()
    return _digest(path, stat.st_size, stat.st_mtime_ns)


@functools.lru_cache(maxsize=16)
def _digest(path: str, n_bytes: int, _mtime_ns: int) -> str:
    """Hash of a file's size, its first and last MiB, and blocks spread evenly over the rest."""
    digest = hashlib.blake2b(str(n_bytes).encode(), digest_size=32)
    with Path(path).open("rb") as file:
        digest.update(file.read(_EDGE_BYTES))
        for i in range(_N_SAMPLES):
            file.seek(n_bytes * i // _N_SAMPLES)
            digest.update(file.read(_SAMPLE_BYTES))
        file.seek(max(0, n_bytes - _EDGE_BYTES))
        digest.update(file.read(_EDGE_BYTES))
    return digest.hexdigest()

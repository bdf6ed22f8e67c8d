"""Memory that a model's header foretells, compared with what llama.cpp says that it takes."""

from __future__ import annotations

import ctypes
import re

import pytest
from claiming import created, loaded
from families import write_family
from gguf import GGMLQuantizationType
from llama_cpp import llama_cpp as raw

from llmaas_eval.families import FAMILIES
from llmaas_patches.native.packing import model_tensors
from llmaas_plugins.flash_weights.model_sizes import metadata_of, sizes_of

MIB = 1 << 20
TOO_HIGH = {True: 10, False: 3}
"""Most MiB too much, by whether attention is flash attention.

With flash attention, other buffers may or may not take the place of masks.
"""
DECODERS = sorted(set(FAMILIES) - {"bert"})


@pytest.fixture
def said():
    """Collect what llama.cpp logs."""
    lines = []

    @raw.llama_log_callback
    def log(_level, text, _user):
        lines.append(text.decode(errors="replace"))

    before, user = raw.llama_log_callback(), ctypes.c_void_p()
    raw.llama_log_get(ctypes.byref(before), ctypes.byref(user))
    raw.llama_log_set(log, None)
    yield lines
    raw.llama_log_set(before, user)


def megabytes(lines, what):
    """Return the sum of the sizes that llama.cpp gives for buffers of this kind."""
    pattern = rf"{what} buffer size = +([\d.]+) MiB"
    return sum(float(found) for found in re.findall(pattern, "".join(lines)))


@pytest.mark.parametrize("is_flash", [False, True])
@pytest.mark.parametrize("name", DECODERS)
def test_cells_and_compute_buffers(said, tmp_path, name, is_flash):
    path = write_family(name, tmp_path / "model.gguf", weights=GGMLQuantizationType.Q8_0)
    tensors, metadata = model_tensors(path), metadata_of(path)
    with loaded(path, use_extra_bufts=False) as model:
        for n_ctx in (512, 4096):
            said.clear()
            settings = {"n_ctx": n_ctx, "n_batch": 512, "n_ubatch": 512}
            with created(model, **settings, flash_attn_type=int(is_flash)):
                cells = megabytes(said, "KV") + megabytes(said, "RS")
                buffers = megabytes(said, "compute")
            sizes = sizes_of(tensors, metadata, n_ctx, is_flash=is_flash)
            assert sizes.kv / MIB == pytest.approx(cells, abs=0.02)
            assert buffers > 0
            assert buffers - 0.01 < sizes.buffers / MIB < buffers + TOO_HIGH[is_flash]

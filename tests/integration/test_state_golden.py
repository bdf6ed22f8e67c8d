"""The state of a sequence in llama.cpp's layout, against blobs that are kept with the tests.

Stores outlive releases of llama-cpp-python, so a new release must keep the layout of a state.
The blobs were made with 0.3.36; 0.3.35 makes the same. To add a layout of a later release, first
make it known to ``model_identity``: cells of another layout belong to another root.
"""

from __future__ import annotations

import ctypes
import struct
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from llama_cpp import llama_cpp

from llmaas_plugins._native import blob_check, blob_probe

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
TOKENS = [1, 400, 401, 402, 403]
NEXT = 404
KINDS = {"flash": True, "transposed": False}
"""Whether flash attention is on; without it, values are stored transposed."""


@pytest.fixture(scope="session")
def reference_model(packaged_model):
    """Return the packaged model, of which the states are."""
    return packaged_model


class State(NamedTuple):
    """A parsed blob.

    Attributes:
        head: All bytes that are neither cells nor rows.
        cells: Position and sequences of each cell.
        types: Each layer's rows: type, bytes of a row or an element, rows of a transposed layer.
        values: Values of all layers, keys first.
    """

    head: tuple[int, ...]
    cells: list[tuple[int, ...]]
    types: list[tuple[int, ...]]
    values: np.ndarray


def parsed(blob):
    at = 0

    def take(code):
        nonlocal at
        (*found,) = struct.unpack_from(f"<{code}", blob, at)
        at += struct.calcsize(f"<{code}")
        return found

    def rows(n_bytes):
        nonlocal at
        at += n_bytes
        return np.frombuffer(blob, np.float16, n_bytes // 2, at - n_bytes).astype(np.float32)

    head = take("QII")  # purpose, streams, cells
    cells = [tuple(take("iIi")) for _ in range(head[-1])]
    head += take("II")  # whether values are transposed, layers
    types, values = [], []
    for _ in range(head[-1]):
        types.append(tuple(take("iQ")))
        values.append(rows(types[-1][1] * len(cells)))
    for _ in range(head[-1]):
        if head[-2]:
            types.append(tuple(take("iII")))
            values.append(rows(types[-1][1] * types[-1][2] * len(cells)))
        else:
            types.append(tuple(take("iQ")))
            values.append(rows(types[-1][1] * len(cells)))
    assert at == len(blob), "there is more in a state than is known"
    return State(tuple(head), cells, types, np.concatenate(values))


def state_of(llama):
    n_bytes = llama_cpp.llama_state_seq_get_size(llama.ctx, 0)
    blob = (ctypes.c_uint8 * n_bytes)()
    assert llama_cpp.llama_state_seq_get_data(llama.ctx, blob, n_bytes, 0) == n_bytes
    return bytes(blob)


def logits_after(llama):
    llama.eval([NEXT])
    row = llama_cpp.llama_get_logits_ith(llama.ctx, -1)
    return np.ctypeslib.as_array(row, (llama.n_vocab(),)).copy()


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_is_laid_out_as_ever(make_llama, kind):
    llama = make_llama(flash_attn=KINDS[kind])
    llama.eval(TOKENS)
    found, expected = parsed(state_of(llama)), parsed((GOLDEN / f"state-{kind}.blob").read_bytes())
    assert found[:3] == expected[:3]
    assert np.abs(found.values - expected.values).max() < 0.05 * np.abs(expected.values).max()


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_of_another_release_goes_on_as_if_it_were_ours(make_llama, kind):
    blob = (GOLDEN / f"state-{kind}.blob").read_bytes()
    computed, restored = (make_llama(flash_attn=KINDS[kind]) for _ in range(2))
    computed.eval(TOKENS)
    data = (ctypes.c_uint8 * len(blob)).from_buffer_copy(blob)
    assert llama_cpp.llama_state_seq_set_data(restored.ctx, data, len(blob), 0) == len(blob)
    restored.n_tokens = len(TOKENS)
    restored.input_ids[: len(TOKENS)] = TOKENS
    expected, found = logits_after(computed), logits_after(restored)
    assert np.abs(found - expected).max() < 0.05 * np.abs(expected).max()
    assert found.argmax() == expected.argmax()


@pytest.mark.parametrize("kind", KINDS)
def test_the_core_reads_it(kind):
    blob = (GOLDEN / f"state-{kind}.blob").read_bytes()
    geometry, n_cells = blob_probe(blob)
    assert n_cells == len(TOKENS)
    assert geometry.v_trans == (not KINDS[kind])
    blob_check(geometry, blob, range(n_cells))

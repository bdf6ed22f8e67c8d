"""Which types of cells need flash attention."""

from __future__ import annotations

import pytest
from gguf import GGMLQuantizationType as Type

from llmaas_plugins.model.cell_types import needs_flash_attention


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (None, False),
        (Type.F32, False),
        (Type.F16, False),
        (Type.BF16, False),
        (Type.Q8_0, True),
        (Type.Q4_0, True),
        (999, False),
    ],
)
def test_quantized_values_need_flash_attention(kind, expected):
    assert needs_flash_attention(None if kind is None else int(kind)) is expected

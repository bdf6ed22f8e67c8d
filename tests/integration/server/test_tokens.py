"""Tokens that the server cannot turn into text."""

from __future__ import annotations

import pytest
from served import LONG_N_CTX

pytest.importorskip("fastapi")


def test_tokens_that_make_no_text(request_):
    status, _, found = request_("POST", "/extras/tokenize", {"input": "☃"})
    half = found["tokens"][:-1]
    status, _, found = request_("POST", "/extras/detokenize", {"tokens": half})
    assert status == 400
    assert "inside a character" in found["error"]["message"]
    status, _, found = request_("POST", "/extras/detokenize", {"tokens": [5] * 5000})
    assert status == 400
    assert found["error"]["message"].startswith(f"tokens: at most {LONG_N_CTX} with this")

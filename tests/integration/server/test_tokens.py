"""Tokens that the server cannot turn into text, and texts that cannot fit."""

from __future__ import annotations

import pytest
from served import LONG_N_CTX, serving

from llmaas_hooks import LlmaasError

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


def test_a_system_prompt_that_cannot_fit_makes_no_context(tmp_path):
    with serving(tmp_path, n_ctx=256) as server:
        app = server.client.bind("mail")
        with pytest.raises(LlmaasError, match=r"exceed context window of 256 \(HTTP 400\)"):
            app.new_context("a b " * 5000)
        assert app.contexts() == []

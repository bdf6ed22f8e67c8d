"""The comparison with vanilla runs the same work with a plugin that is really active."""

from __future__ import annotations

import pytest

from llmaas_eval.inference import App, Lengths

LENGTHS = Lengths(n_prompt=40, n_tokens=4, n_turns=2, n_question=20, n_reply=6)


@pytest.mark.slow
def test_an_app_with_the_plugin_does_what_one_without_does(reference_model, tmp_path):
    config = {"on_error": "raise", "plugins": {"kv_chunks": {"store": str(tmp_path / "kv")}}}
    with App(reference_model, LENGTHS, config) as ours, App(reference_model, LENGTHS, None) as app:
        found, expected = ours.work(1), app.work(1)
        assert found.tokens == expected.tokens
        assert len(found.tokens) == 1 + LENGTHS.n_tokens
        assert found.n_replied == expected.n_replied == LENGTHS.n_turns * LENGTHS.n_reply
        status = ours.status()
        assert app.status() == {}
    assert status["errors"] == {}
    kv = status["plugins"]["kv_chunks"]
    assert kv["codec"] == "tolerance"
    assert kv["chunks"] * kv["chunk_tokens"] > LENGTHS.n_prompt  # prompt and chat were saved
    [context] = status["native"]["contexts"]
    assert context["taps"] > 0  # attention is tapped

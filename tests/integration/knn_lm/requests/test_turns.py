"""An answer that others interrupt is mixed and judged as without interruptions."""

from __future__ import annotations

from datastores import QUESTIONS, K
from interrupted import check_interruptions, opened
from knn_stores import report

from llmaas_plugins.activation import active_suite


def test_an_interrupted_answer_keeps_its_mixture(pairs, reference_model, tmp_path):
    folder = tmp_path / "knn"
    folder.mkdir()
    pairs.write(folder)
    with opened(reference_model, tmp_path, knn_lm={"store": str(folder), "k": K}) as turns:
        prompt = f"User: {QUESTIONS[0]}\nAssistant: Bruno sleeps in the old boat".encode()
        check_interruptions(turns, prompt=turns.llama.tokenize(prompt))
        assert report(active_suite())["mixed"] > 0

"""The oracle of the studies of shorter prompts: the gradient of an answer's likelihood."""

from __future__ import annotations

import numpy as np
import pytest
from preparing import prepare

from llmaas_eval.prompts.engine import opened
from llmaas_eval.prompts.scorers import ORACLE, Material, scorers_of
from llmaas_eval.prompts.words import words_of

torch = pytest.importorskip("torch", reason="make test-train installs it")
gradient = pytest.importorskip("llmaas_eval.prompts.gradient")


@pytest.fixture(scope="module")
def model(light_model, tmp_path_factory):
    return prepare(light_model, tmp_path_factory.mktemp("prompts") / "light.elastic.gguf")


class Scaled(gradient.KeptDecoder):
    """Decoder in which the embedding of one token is scaled."""

    at, factor = 0, 1.0

    def embed(self, windows):
        x = super().embed(windows)
        x[0, self.at] *= self.factor
        return x

    def nats(self, prompt, answer):
        x = self.run(np.concatenate([prompt, answer[:-1]])[None])[0, -len(answer) :]
        return float(self.losses(x, torch.from_numpy(answer.astype(np.int64))).sum())


def test_the_oracle_is_the_gradient_of_the_answers_likelihood(model):
    decoder = Scaled(model)
    prompt, answer = np.arange(300, 312, dtype=np.int32), np.array([400, 401], np.int32)
    found = gradient.influences(decoder, prompt, answer)
    decoder.at = int(np.abs(found).argmax())
    nats = []
    for decoder.factor in (0.98, 1.02):
        nats.append(decoder.nats(prompt, answer))
    assert found[decoder.at] == pytest.approx((nats[0] - nats[1]) / 0.04, rel=0.05)


def test_the_oracle_knows_the_answer(model):
    with opened(model, 64) as engine:
        prompt = words_of(engine, engine.tokens("User: The code is 12.\nUser: Code?\n"))
        score = scorers_of(engine, [ORACLE])[ORACLE]
        found = [score(prompt, Material(engine, engine.tokens(text))) for text in (" 12", " Anna")]
    assert found[0].shape == found[1].shape == (len(prompt.words),)
    assert not np.allclose(*found)

"""Words on which a model's answers depend, found by one backward pass for each prompt."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from llama_cpp import Llama

from llmaas_hooks import ConfigError

torch = pytest.importorskip("torch", reason="make test-train installs it")
answer_labels = pytest.importorskip("llmaas_plugins.training.answer_labels")
torch_model = pytest.importorskip("llmaas_plugins.elastic.torch_model")

SENTENCE = (
    " The red bus to York leaves at 9:15 from platform two. Zo\u00eb waits.\n\nIt is \u00a35."
)
TEXT = SENTENCE * 8


@pytest.fixture(scope="module")
def llama(reference_model):
    made = Llama(str(reference_model), n_ctx=256, n_threads=1, verbose=False)
    with contextlib.closing(made):
        yield made


@pytest.fixture(scope="module")
def decoder(reference_model):
    return torch_model.Decoder(reference_model)


class Progress(dict):
    keep = dict.update


@pytest.mark.parametrize("text", [TEXT, TEXT.strip()])
def test_each_token_belongs_to_its_word(llama, text):
    (part,) = answer_labels.parts_of([text], llama, 1)
    assert len(part.tokens) == len(part.places) <= answer_labels.N_PROMPT
    assert text.startswith("".join(part.words))
    for i, word in enumerate(part.words):
        own = b"".join(answer_labels._piece(llama, int(t)) for t in part.tokens[part.places == i])
        assert own.strip() == word.strip().encode()


def test_weights_are_the_change_of_the_answers_likelihood(llama, decoder, monkeypatch):
    (part,) = answer_labels.parts_of([TEXT], llama, 1)
    prompt = part.tokens[:24]
    answer = answer_labels._answer(llama, prompt)
    found = answer_labels.saliencies(decoder, prompt, answer)
    assert found.shape == (24,)
    embed, step = decoder.embed, 1e-2

    def likelihood(place, factor):
        def scaled(windows):
            x = embed(windows)
            x[0, place] *= factor
            return x

        with monkeypatch.context() as patch:
            patch.setattr(decoder, "embed", scaled)
            x = decoder.run(np.concatenate([prompt, answer])[None, :-1])[0]
        return float(decoder.losses(x[23:], torch.from_numpy(answer).long()).sum())

    for place in np.argsort(-np.abs(found))[:3]:
        slope = (likelihood(place, 1 + step) - likelihood(place, 1 - step)) / (2 * step)
        assert found[place] == pytest.approx(slope, rel=0.05, abs=0.01)


def test_words_with_the_largest_weights_are_kept_and_weights_are_kept_for_later(llama, decoder):
    parts = answer_labels.parts_of([TEXT, TEXT.upper()], llama, 9)
    kept, done = Progress(), []
    found = list(
        answer_labels.labeled(parts, llama, decoder, 0.25, kept=kept, progress=done.append)
    )
    assert done == [len(parts)]
    for one, part in zip(found, parts, strict=True):
        assert one.words == part.words
        assert sum(one.is_kept) == round(0.25 * len(part.words))
    again = answer_labels.labeled(parts, None, None, 0.25, kept=kept)
    assert list(again) == found


def test_texts_without_words_are_refused(llama):
    with pytest.raises(ConfigError, match="no eight words in a row"):
        answer_labels.parts_of(["one two", ""], llama, 3)

"""Questions with the words that ``short_prompts`` keeps, so that they are answered as served.

The random model that is served and the models that answer have one vocabulary, so the words of a
prompt are the same, and so are those that a scorer keeps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np
from llama_cpp import Llama

from llmaas_eval.deadlines.loaded.answers import tokenizer
from llmaas_eval.deadlines.loaded.scoring import Item
from llmaas_eval.deadlines.loaded.systems import Kind
from llmaas_eval.prompts.words import shortened
from llmaas_plugins.model.digest import file_digest
from llmaas_plugins.short_prompts.encoder.model_file import find_encoder
from llmaas_plugins.short_prompts.protection import prompt_of
from llmaas_plugins.short_prompts.scorers.encoder import EncoderScorer
from llmaas_plugins.short_prompts.vocabulary import vocabulary_of

__all__ = ["UNTRAINED", "Shorter", "trained_encoder"]

UNTRAINED = "no encoder of prompts is trained; `llmaas prompts learn` trains one"
_NONCE = "100-8"
"""Line like those before cold prompts: it takes a part of what may be read."""


def trained_encoder() -> Path | None:
    """Return the encoder for all models, as the random one has no other; None if there is none."""
    return find_encoder(None)


class Shorter:
    """Shorter prompts of a kind.

    Attributes:
        name: Name that another encoder's prompts, or those of another kind, do not have.
    """

    def __init__(self, encoder: Path, model: Path, kind: Kind) -> None:
        """Judge words by an encoder; they are those of the vocabulary of ``model``."""
        self.name = f"{kind}-{file_digest(encoder)[:8]}"
        self._encoder, self._model, self._kind = encoder, model, kind

    def items(self, items: Sequence[Item], rows: Collection[int], share: float) -> list[Item]:
        """Return the questions, some of them with a share of their prompts' tokens.

        The line before a cold prompt is left out: the question is answered without it.
        """
        found, scorer = [*items], EncoderScorer(self._encoder, n_threads=1)
        with tokenizer(self._model) as llama, contextlib.closing(scorer):
            vocabulary, nonce = vocabulary_of(llama), list[int]()
            if self._kind == "cold":
                nonce = llama.tokenize(_NONCE.encode(), add_bos=False)
            for i in rows:
                tokens = self._read(llama, items[i].prompt)
                prompt = prompt_of(np.array(tokens, np.int32), vocabulary)
                kept = shortened(prompt, scorer.scores(prompt, llama), share).tolist()
                if nonce and kept[1 : len(nonce) + 1] == nonce:
                    del kept[1 : len(nonce) + 1]
                found[i] = items[i]._replace(prompt=kept)
        return found

    def _read(self, llama: Llama, prompt: Sequence[int]) -> Sequence[int]:
        """Return a prompt's tokens as a service gets them."""
        if self._kind == "warm":
            return prompt
        text = _NONCE.encode() + b"\n" + llama.detokenize([*prompt])
        return list(llama.tokenize(text, add_bos=True))

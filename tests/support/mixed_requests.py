"""Requests whose tokens knn_lm mixes, and what they are compared with."""

from __future__ import annotations

import contextlib
import itertools
import json

import numpy as np
from datastores import ENGINE, QUESTIONS, K, Natives
from llama_cpp import Llama, LlamaGrammar, LogitsProcessorList

from llmaas_hooks import hookimpl
from llmaas_plugins import activate

ONE_BY_ONE = {"n_ubatch": 1, "flash_attn": True}
"""With these, a token's logits do not depend on the other tokens of its batch."""

NAME = {"enum": ["Bruno", "Anna"]}
NAMES = {"type": "object", "properties": {"name": NAME}, "required": ["name"]}
SAMPLERS = {
    "greedy": {"temp": 0.0},
    "temperature alone": {"temp": 1.3, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
    "top-k": {"temp": 0.9, "top_k": 5},
    "top-p": {"temp": 0.9, "top_p": 0.5},
    "min-p": {"temp": 0.9, "min_p": 0.2},
    "typical": {"temp": 0.9, "typical_p": 0.5},
    "mirostat": {"temp": 0.9, "mirostat_mode": 1},
    "mirostat 2": {"temp": 0.9, "mirostat_mode": 2},
    "softmax alone": {"temp": -1.0},
    "penalties": {
        "temp": 0.0,
        "repeat_penalty": 1.3,
        "frequency_penalty": 0.5,
        "presence_penalty": 0.5,
    },
    "grammar": {"temp": 0.0, "grammar": NAMES},
    "sampled grammar": {"temp": 0.9, "grammar": NAMES},
}


@contextlib.contextmanager
def mixing_engine(model, store, **table):
    """Activate knn_lm with a datastore; yield the suite, and an engine of one-by-one tokens."""
    own = {"store": str(store), "k": K, "look_back": 0} | table
    with (
        activate({"on_error": "raise", "plugins": {"knn_lm": own}}) as suite,
        contextlib.closing(Llama(str(model), **(ENGINE | ONE_BY_ONE))) as llama,
    ):
        yield suite, llama


class Witness(Natives):
    """Plugin that taps hidden states and logits before the tested plugin changes them."""

    def __init__(self):
        super().__init__()
        self.taps = {}
        self.states = {}
        self.seen = []

    @hookimpl
    def llmaas_request_begin(self, request):
        ctx = request.engine.ctx
        if ctx not in self.taps:
            self.taps[ctx] = self.by_ctx[ctx].hidden_states("ffn_input")

    @hookimpl
    def llmaas_decode(self, step):
        if step.ctx in self.taps:
            self.states[step.ctx] = self.taps[step.ctx].take()

    @hookimpl(tryfirst=True)
    def llmaas_logits(self, view):
        self.seen.append((self.states[view.ctx][view.index], view.logits.copy()))


class Steps:
    """Counter of batches."""

    n = 0

    @hookimpl
    def llmaas_decode(self):
        self.n += 1


def tokens_of(llama, question):
    return llama.tokenize(f"User: {question}\nAssistant:".encode(), special=True)


def watched(llama, prompt, n=12, sampling=SAMPLERS["greedy"], processor=None):
    """Return the next tokens, and the logits from which each was sampled."""
    rows = []

    def watch(input_ids, scores):
        scores = scores if processor is None else processor(len(rows))
        rows.append(scores.copy())
        return scores

    sampling = dict(sampling)
    if "grammar" in sampling:
        schema = json.dumps(sampling["grammar"])
        sampling["grammar"] = LlamaGrammar.from_json_schema(schema, verbose=False)
    stream = llama.generate(prompt, logits_processor=LogitsProcessorList([watch]), **sampling)
    wanted = itertools.takewhile(lambda token: token != llama.token_eos(), stream)
    tokens = list(itertools.islice(wanted, n))
    stream.close()
    return tokens, np.array(rows)


def said(llama, question=QUESTIONS[0], n=16, **kwargs):
    options = {"temperature": 0.0, "max_tokens": n} | kwargs
    return llama(f"User: {question}\nAssistant:", **options)["choices"][0]["text"]


def mixed(suite):
    return suite.status()["plugins"]["knn_lm"]["mixed"]

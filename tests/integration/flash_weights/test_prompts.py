"""flash_weights, sparse: prompts are exact for all batches, histories and drafts."""

from __future__ import annotations

import contextlib

import llama_cpp
import numpy as np
import pytest
from llama_cpp import Llama
from llama_cpp.llama_cache import LlamaRAMCache
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

import llmaas_plugins
from llmaas_plugins import activate

PROMPT = "My name is Anna and I live in a small house near the station. I have a dog. His name is"
OTHER = "The sea is wide and the boat is small."
SETTINGS = {"n_ctx": 256, "n_threads": 1, "n_threads_batch": 1, "verbose": False}


@contextlib.contextmanager
def opened(model, *, is_sparse=True, plugins=(), **settings):
    table = {"flash_weights": {"mode": "sparse", "arena": 4 << 20, "sparsity": 0.7}}
    tables = (table if is_sparse else {}) | dict(plugins)
    with (
        activate({"on_error": "raise", "plugins": tables}) as suite,
        contextlib.closing(Llama(str(model), **{**SETTINGS, **settings})) as llama,
    ):
        yield llama, suite


def prompt_logits(llama, n_tokens):
    """Return the engine's logits of a prompt's last token."""
    llama.reset()
    llama.eval(llama.tokenize(PROMPT.encode())[:n_tokens])
    return np.array(np.ctypeslib.as_array(llama._ctx.get_logits(), (llama.n_vocab(),)))


def text(llama, prompt=PROMPT, n_tokens=16):
    return llama(prompt, max_tokens=n_tokens, temperature=0)["choices"][0]["text"]


@pytest.mark.slow
@pytest.mark.parametrize("batches", [{}, {"n_batch": 4}, {"n_ubatch": 3}], ids=str)
def test_logits_of_a_prompt_are_stock(sparse, batches):
    lengths = (1, 5, 13)
    with opened(sparse, is_sparse=False, **batches) as (llama, _):
        expected = [prompt_logits(llama, n_tokens) for n_tokens in lengths]
    with opened(sparse, **batches) as (llama, _):
        for n_tokens, logits in zip(lengths, expected, strict=True):
            assert np.array_equal(prompt_logits(llama, n_tokens), logits)


def logits_of_sent(llama, sent):
    """Return logits of an answer's first token, and of tokens that are sent for verification."""
    llama.reset()
    prompt = llama.tokenize(PROMPT.encode())
    stream = llama.generate(prompt, temp=0.0)
    next(stream)
    stream.send(sent)
    stream.close()
    return np.array(llama.scores[len(prompt) : len(prompt) + 1 + len(sent)])


@pytest.mark.slow
@pytest.mark.parametrize("n_ubatch", [2, 3, 512])
def test_tokens_that_are_sent_into_an_answer_are_exact(sparse, n_ubatch):
    """A single token left over from a batch is computed like the others."""
    settings = {"logits_all": True, "n_ubatch": n_ubatch}
    sent = [list(range(500, 500 + n)) for n in (1, 2, 6)]
    with opened(sparse, is_sparse=False, **settings) as (llama, _):
        expected = [logits_of_sent(llama, tokens) for tokens in sent]
    with opened(sparse, **settings) as (llama, _):
        for tokens, logits in zip(sent, expected, strict=True):
            assert np.array_equal(logits_of_sent(llama, tokens), logits)


def eval_all(llama, tokens):
    llama.eval(tokens)


def decode_all(llama, tokens):
    """Decode like ``eval``, but without its books and its batch splits."""
    batch = llama._batch
    batch.set_batch(batch=tokens, n_past=llama.n_tokens, logits_all=True)
    llama._ctx.decode(batch)


@pytest.mark.parametrize(
    ("evaluate", "batches"),
    [(eval_all, {"n_ubatch": 2}), (eval_all, {"n_batch": 2}), (decode_all, {"n_ubatch": 2})],
)
def test_a_batch_inside_a_block_is_exact_however_it_is_split(sparse, evaluate, batches):
    def logits(llama, block):
        llama.eval(llama.tokenize(PROMPT.encode()))
        with block:
            evaluate(llama, [500, 501, 502])
        row = llama_cpp.llama_get_logits_ith(llama.ctx, -1)
        return np.array(np.ctypeslib.as_array(row, (llama.n_vocab(),)))

    with opened(sparse, is_sparse=False, **batches) as (llama, _):
        expected = logits(llama, contextlib.nullcontext())
    with opened(sparse, **batches) as (llama, suite):
        block = suite.plugin("flash_weights").answer(llama)
        assert np.array_equal(logits(llama, block), expected)


def answers(llama):
    """Return answers to requests of which all but the first find an answer's cells."""
    first = text(llama)
    return [
        first,
        text(llama, n_tokens=1),
        text(llama),
        text(llama, PROMPT + first, n_tokens=1),
        text(llama, PROMPT + first[: len(first) // 2] + OTHER),
        text(llama, OTHER),
        text(llama),
    ]


def anew(llama, prompts):
    """Yield the first tokens that follow these prompts, each from an empty context."""
    for prompt in prompts:
        llama.reset()
        yield text(llama, prompt, 1)


@pytest.mark.slow
@pytest.mark.parametrize("store", [False, True], ids=["alone", "kv_chunks"])
def test_history_does_not_matter(sparse, tmp_path, store):
    plugins = {"kv_chunks": {"store": str(tmp_path), "codec": "lossless"}} if store else {}
    with opened(sparse, plugins=plugins) as (llama, _):
        first, again, third, *_, last = answers(llama)
        assert first.startswith(again)
        assert first == third == last
    with opened(sparse, plugins=plugins) as (llama, _):  # after a restart
        assert text(llama) == first


def test_cells_of_an_answer_are_not_a_prompt(sparse):
    """So many values are left out here that reused cells would change the text."""
    with opened(sparse, is_sparse=False) as (llama, _):
        stock = text(llama)
    with opened(sparse) as (llama, _):
        said = text(llama)
        (first,) = anew(llama, [PROMPT + said + OTHER])
        text(llama)
        assert text(llama, PROMPT + said + OTHER, 1) == first
        n_prompt = len(llama.tokenize((PROMPT + said + OTHER).encode()))
        found = np.array(np.ctypeslib.as_array(llama._ctx.get_logits(), (llama.n_vocab(),)))
        llama.reset()
        llama.eval(llama.tokenize((PROMPT + said + OTHER).encode()))
        assert llama.n_tokens == n_prompt
        whole = np.array(np.ctypeslib.as_array(llama._ctx.get_logits(), (llama.n_vocab(),)))
        assert np.abs(found - whole).max() < 1e-3  # batches were split elsewhere
    assert said != stock


def test_a_saved_state_remembers_where_its_answer_begins(sparse):
    with opened(sparse) as (llama, _):
        said = text(llama)
        state = llama.save_state()
        text(llama, OTHER)
        llama.load_state(state)
        continued = text(llama, PROMPT + said + OTHER)
        llama.reset()
        assert text(llama, PROMPT + said + OTHER) == continued
        llama.set_cache(LlamaRAMCache())
        assert [text(llama) for _ in range(3)] == [said] * 3


def test_a_state_is_kept_whole_where_nothing_is_sparse(sparse):
    with opened(sparse, is_sparse=False, plugins={"flash_weights": {}}) as (llama, _):
        text(llama)
        state = llama.save_state()
        llama.load_state(state)
        assert llama.n_tokens == state.n_tokens
        list(zip(llama.generate(llama.tokenize(PROMPT.encode()), temp=0), range(1), strict=False))


class Drafts(LlamaPromptLookupDecoding):
    """Draft model that counts its calls."""

    n_asked = 0

    def __call__(self, *arguments, **named):
        """Propose the tokens that followed the same tokens before."""
        self.n_asked += 1
        return super().__call__(*arguments, **named)


@pytest.mark.slow
def test_drafts_are_declined(sparse):
    with opened(sparse) as (llama, _):
        expected = text(llama, n_tokens=48)
    drafts = Drafts(num_pred_tokens=4)
    with opened(sparse, draft_model=drafts) as (llama, suite):
        assert text(llama, n_tokens=48) == expected
        assert suite.status()["plugins"]["flash_weights"]["without_drafts"] == 1
        assert llama.draft_model is drafts
        assert drafts.n_asked == 0
        with llmaas_plugins.without("flash_weights"):
            text(llama)
        assert drafts.n_asked > 0


def test_a_request_may_do_without(sparse):
    with opened(sparse, is_sparse=False) as (llama, _):
        expected = text(llama)
    with opened(sparse) as (llama, _):
        with llmaas_plugins.without("flash_weights"):
            assert text(llama) == expected
        assert text(llama) != expected


def test_eval_is_exact_outside_of_answers(sparse):
    with opened(sparse, logits_all=True) as (llama, suite):
        tokens = llama.tokenize(PROMPT.encode())
        llama.eval(tokens)
        whole = np.array(llama.scores[: len(tokens)])
        runs = []
        for block in (contextlib.nullcontext(), suite.plugin("flash_weights").answer(llama)):
            llama.reset()
            with block:
                for token in tokens:
                    llama.eval([token])
            runs.append(np.array(llama.scores[: len(tokens)]))
    exact, sparse = (np.abs(run - whole).max() for run in runs)
    assert exact < 1e-3 < sparse

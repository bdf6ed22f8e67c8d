"""``llmaas_kv_restore`` on the packaged model: how ``Llama`` uses restored cells."""

from __future__ import annotations

import ctypes

import llama_cpp
import numpy as np
import pytest

from llmaas_hooks import KVRestored, PluginError, hookimpl

PROMPT = [1, 400, 401, 402, 403, 404]


def greedy(llama, tokens, n):
    generator = llama.generate(tokens, temp=0.0)
    found = [next(generator) for _ in range(n)]
    generator.close()
    return found


class Stats:
    def __init__(self):
        self.stats = []

    @hookimpl
    def llmaas_request_end(self, stats):
        self.stats.append(stats)


class Restorer(Stats):
    """Plugin that claims the first cells for the prompt; the test makes the claim true."""

    def __init__(self, n_tokens):
        super().__init__()
        self.n_tokens = n_tokens

    @hookimpl
    def llmaas_kv_restore(self, request):
        return KVRestored(self.n_tokens, 0) if len(request.engine.resident_tokens()) else None


def test_hook_llmaas_kv_restore(patched, make_llama):
    longer = [*PROMPT, 420, 421]
    expected = greedy(make_llama(), longer, 5)
    restorer = Restorer(len(PROMPT))
    patched(restorer=restorer)
    llama = make_llama()
    greedy(llama, PROMPT, 1)
    llama.input_ids[:] = 0  # as if Llama had lost its books: only the plugin knows
    assert greedy(llama, longer, 5) == expected
    assert restorer.stats[-1].n_reused == len(PROMPT)


def test_restored_whole_prompt_is_sampled_from_fresh_logits(patched, make_llama):
    expected = greedy(make_llama(), PROMPT, 5)
    patched(restorer=Restorer(len(PROMPT)))
    llama = make_llama()
    greedy(llama, PROMPT, 1)
    assert greedy(llama, PROMPT, 5) == expected


def test_echoed_logprobs_are_never_those_of_another_prompt(patched, make_llama):
    text, settings = "I would like a quiet room.", {"max_tokens": 2, "temperature": 0}
    echoed = {**settings, "echo": True, "logprobs": 2}
    vanilla = make_llama(logits_all=True).create_completion(text, **echoed)["choices"]
    restorer = Restorer(4)
    patched(restorer=restorer)
    llama = make_llama(logits_all=True)
    llama.create_completion(text, **settings)
    llama.scores[:] = 0  # restored cells come without logits
    llama.create_completion(text, **settings)
    assert restorer.stats[-1].n_reused == 4
    assert llama.create_completion(text, **echoed)["choices"] == vanilla
    assert restorer.stats[-1].n_reused == 0


def test_echoed_logprobs_of_restored_cells_that_an_app_put_back(patched, make_llama):
    text, settings = "I would like a quiet room.", {"max_tokens": 2, "temperature": 0}
    echoed = {**settings, "echo": True, "logprobs": 2}
    vanilla = make_llama(logits_all=True).create_completion(text, **echoed)["choices"]
    patched(restorer=Restorer(4))
    llama = make_llama(logits_all=True)
    for _ in range(2):
        llama.create_completion(text, **settings)
    blob = (ctypes.c_uint8 * llama_cpp.llama_state_seq_get_size(llama.ctx, 0))()
    llama_cpp.llama_state_seq_get_data(llama.ctx, blob, len(blob), 0)
    llama.scores[:] = 0  # restored cells come without logits
    assert llama_cpp.llama_state_seq_set_data(llama.ctx, blob, len(blob), 0)
    assert llama.create_completion(text, **echoed)["choices"] == vanilla


def test_restored_tokens_have_no_scores_of_others(patched, make_llama):
    text, settings = "I would like a quiet room.", {"max_tokens": 2, "temperature": 0}
    patched(restorer=Restorer(4))
    llama = make_llama(logits_all=True)
    llama.create_completion(text, **settings)
    own = llama.scores[:4].copy()
    llama.create_completion(text, **settings)
    np.testing.assert_array_equal(llama.scores[:4], own)
    llama.create_completion("Once upon a time, far away", **settings)
    llama.scores[:] = np.finfo(np.float32).max  # unwritten rows may hold anything
    llama.create_completion(text, **settings, logprobs=2)
    assert not llama.scores[1:4].any()
    assert np.isfinite(llama.scores[4:7]).all()


class BrokenRestorer(Stats):
    """Plugin that spoils the cells at the second request, then fails."""

    def __init__(self, error=None):
        super().__init__()
        self.error = error or OSError("torn")

    @hookimpl
    def llmaas_kv_restore(self, request):
        if self.stats and self.error:
            request.engine.llama._ctx.kv_cache_seq_rm(0, 1, -1)
            error, self.error = self.error, None
            raise error


def test_failed_restore_evaluates_the_whole_prompt(patched, make_llama, caplog):
    expected = greedy(make_llama(), PROMPT, 5)
    broken = BrokenRestorer()
    patched(broken=broken, on_error="log")
    llama = make_llama()
    greedy(llama, PROMPT, 2)
    assert greedy(llama, PROMPT, 5) == expected
    assert broken.stats[-1].n_reused == 0
    assert "plugin 'broken' failed in llmaas_kv_restore: OSError: torn" in caplog.text


def test_failed_restore_raises_when_asked_to(patched, make_llama):
    expected = greedy(make_llama(), PROMPT, 5)
    patched(broken=BrokenRestorer(), on_error="raise")
    llama = make_llama()
    greedy(llama, PROMPT, 2)
    with pytest.raises(PluginError, match="torn"):
        greedy(llama, PROMPT, 5)
    assert greedy(llama, PROMPT, 5) == expected  # the cells were dropped


def test_interrupted_restore_drops_the_cells(patched, make_llama):
    expected = greedy(make_llama(), PROMPT, 5)
    patched(broken=BrokenRestorer(KeyboardInterrupt()))
    llama = make_llama()
    greedy(llama, PROMPT, 2)
    with pytest.raises(KeyboardInterrupt):
        greedy(llama, PROMPT, 5)
    assert greedy(llama, PROMPT, 5) == expected

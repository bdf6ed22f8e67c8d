"""Trust in the datastore within a request."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from datastores import QUESTIONS
from knn_stores import report
from llama_cpp import llama_cpp
from mixed_requests import ONE_BY_ONE, mixing_engine, said

import llmaas_plugins
from llmaas_plugins.knn_lm.mixing.judgment import Judgment
from llmaas_plugins.knn_lm.mixing.trust import LEAST_GAIN


def mixer_of(suite, llama):
    """Return the mixer of an engine."""
    return suite.plugin("knn_lm")._served[int(llama.ctx)].mixer


class TestTrust:
    """Trust in the datastore, derived from how it predicts the prompt."""

    KNOWN = (
        f"User: {QUESTIONS[1]}\nAssistant: At seven, from the pier.\n"
        f"User: {QUESTIONS[0]}\nAssistant: Bruno sleeps in the old boat behind the"
    )

    @staticmethod
    def weight(suite, llama, prompt, n=1):
        """Return a prompt's trust after ``n`` tokens of a reply."""
        tokens = llama.tokenize(prompt.encode(), special=True)
        stream = llama.generate(tokens, temp=0.0)
        for _ in range(n):
            next(stream)
        return mixer_of(suite, llama)._judgment.trust.weight

    @pytest.fixture(scope="class")
    @classmethod
    def expected(cls, pairs, reference_model, tmp_path_factory):
        """Return the trust of a known text, evaluated at once by a fresh engine."""
        folder = tmp_path_factory.mktemp("expected")
        pairs.write(folder)
        with mixing_engine(reference_model, folder, look_back=32) as (suite, llama):
            return cls.weight(suite, llama, cls.KNOWN)

    def test_a_known_text_is_trusted_and_another_is_not(self, make, mixing, expected):
        assert expected > 0.9
        other = "The treaty of 1648 ended a war between 12 states, as numbers 7 and 9 of it say,"
        with mixing(look_back=32) as suite, contextlib.closing(make()) as llama:
            # and distant neighbors have no weight anyway
            assert self.weight(suite, llama, other) < 0.25

    def test_is_the_same_in_whatever_batches(self, make, mixing, expected):
        with mixing(look_back=32) as suite:
            for n_batch in (1, 5, 31, 32, 33):
                llama = make(**ONE_BY_ONE, n_batch=n_batch)
                assert self.weight(suite, llama, self.KNOWN) == expected, n_batch
                llama.close()

    def test_is_the_same_whatever_came_before(self, make, mixing, expected, monkeypatch):
        with mixing(look_back=32) as suite:
            llama = make(**ONE_BY_ONE)
            for start in ("The treaty of 1648", self.KNOWN[:-70], self.KNOWN, self.KNOWN + " sea"):
                self.weight(suite, llama, start, n=3)
                assert self.weight(suite, llama, self.KNOWN) == expected

            def fail(_):
                raise RuntimeError("the client left")

            with monkeypatch.context() as patch:
                patch.setattr(llama._ctx, "decode", fail)
                with pytest.raises(RuntimeError, match="client"):
                    self.weight(suite, llama, self.KNOWN[:-30])
            assert self.weight(suite, llama, self.KNOWN) == expected

    def test_is_the_same_after_a_restart_that_restores_cells(self, make, mixing, tmp_path):
        kv = {"kv_chunks": {"store": str(tmp_path / "kv"), "codec": "lossless"}}
        long = "Anna wrote to Bruno in the winter. " * 3 + self.KNOWN
        texts = set()
        for turn in range(3):
            with mixing(look_back=32, plugins=kv) as suite:
                llama = make(**ONE_BY_ONE)
                text = llama(long, max_tokens=8, temperature=0.0)["choices"][0]["text"]
                texts.add((text, self.weight(suite, llama, long)))
                n_loaded = suite.status()["plugins"]["kv_chunks"]["restored_tokens"]
                assert (n_loaded > 0) == (turn > 0)
        assert len(texts) == 1

    def test_an_approximate_index_finds_different_numbers_of_neighbors(
        self, make, mixing, monkeypatch
    ):
        pytest.importorskip("faiss")
        numbers, sampled = set(), Judgment.sampled

        def count(judgment, tokens, bets):
            numbers.add(0 if bets is None else len(bets.found.values))
            sampled(judgment, tokens, bets)

        monkeypatch.setattr(Judgment, "sampled", count)
        with mixing(look_back=32, index="faiss", k=100) as suite, contextlib.closing(make()) as one:
            weights = {self.weight(suite, one, self.KNOWN, n=24) for _ in range(2)}
            assert report(suite)["remembered_gains"] > 32
        assert len(numbers) > 1
        assert len(weights) == 1

    def test_a_request_that_goes_on_without_its_beginning_has_the_prior(self, make, mixing):
        with mixing(look_back=32) as suite, contextlib.closing(make()) as llama:
            tokens = llama.tokenize(self.KNOWN.encode(), special=True)
            llama.eval(tokens[:20])
            stream = llama.generate(tokens[20:], temp=0.0, reset=False)
            next(stream)
            assert mixer_of(suite, llama)._judgment.trust.weight == pytest.approx(0.25)

    def test_nothing_is_searched_for_a_text_that_it_does_not_know(self, make, mixing, monkeypatch):
        monkeypatch.setattr(Judgment, "_gains", lambda _, bets, __: [LEAST_GAIN] * len(bets))
        with mixing(look_back=32) as suite, contextlib.closing(make()) as llama:
            tokens = llama.generate(llama.tokenize(QUESTIONS[2].encode()), temp=0.0)
            next(tokens)
            before = suite.status()["plugins"]["knn_lm"]
            next(tokens), next(tokens)
            after = suite.status()["plugins"]["knn_lm"]
        assert after["distrusted"] == before["distrusted"] + 2
        assert (after["mixed"], after["search_s"]) == (before["mixed"], before["search_s"])

    @pytest.mark.parametrize("n_tokens", [1, 6])
    def test_afterwards_the_app_reads_its_own_token_s_logits(self, make, vanilla, mixing, n_tokens):
        def read(llama):
            tokens = llama.tokenize(QUESTIONS[2].encode())
            found = []
            for n in (len(tokens), 3, len(tokens) - 4):
                said(llama, QUESTIONS[2], n=n_tokens)
                pointer = llama_cpp.llama_get_logits(llama.ctx)
                found.append(np.ctypeslib.as_array(pointer, shape=(llama.n_vocab(),)).copy())
                with contextlib.suppress(RuntimeError):  # a request that fails
                    next(llama.generate([10**6], temp=0.0))
                stream = llama.generate(tokens, temp=0.0)  # a stream that stays open
                next(stream)
                llama.reset()
                llama.eval(tokens[:n])
                pointer = llama_cpp.llama_get_logits(llama.ctx)
                found.append(np.ctypeslib.as_array(pointer, shape=(llama.n_vocab(),)).copy())
            return np.array(found)

        expected = vanilla(read, **ONE_BY_ONE)
        with mixing(look_back=32, alpha=1e-9):
            assert np.allclose(read(make(**ONE_BY_ONE)), expected, atol=1e-4)

    def test_rows_beyond_the_last_are_asked_for_only_then(self, make, mixing):
        with mixing(look_back=4) as suite, contextlib.closing(make()) as llama:
            tokens = llama.tokenize(QUESTIONS[0].encode())
            next(llama.generate(tokens, temp=0.0))
            mixer = mixer_of(suite, llama)
            assert len(mixer._rows) == 4
            llama.reset()
            with llmaas_plugins.without("knn_lm"):
                next(llama.generate([*tokens, 300], temp=0.0))
            assert len(mixer._rows) == 1

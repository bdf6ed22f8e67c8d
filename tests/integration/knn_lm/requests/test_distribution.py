"""knn_lm's effect on requests: one distribution, under every sampler, or vanilla's."""

from __future__ import annotations

import contextlib
import itertools
import json

import numpy as np
import pytest
from datastores import ENGINE, QUESTIONS, softmax
from llama_cpp import Llama, LlamaGrammar
from mixed_requests import (
    NAMES,
    SAMPLERS,
    Witness,
    mixed,
    said,
    tokens_of,
    watched,
)

import llmaas_plugins
from llmaas_hooks import UnknownPluginError, hookimpl


@pytest.fixture(scope="session")
def reference_model(packaged_model):
    """Return the packaged model, which is sure of some tokens."""
    return packaged_model


class TestDistribution:
    @pytest.mark.parametrize("question", QUESTIONS)
    def test_is_that_of_the_equations(self, mixing, make, pairs, question):
        """A search in all keys gives the expectation, from hidden states tapped independently."""
        witness = Witness()
        suite = mixing(witness)
        llama = make()
        _, rows = watched(llama, tokens_of(llama, question))
        assert mixed(suite) == len(rows) == len(witness.seen)
        changes = []
        for row, (state, logits) in zip(rows, witness.seen, strict=True):
            found, expected = softmax(row), pairs.probabilities(state, logits)
            assert np.allclose(found, expected, rtol=2e-3, atol=1e-7)
            changes.append(np.abs(found - softmax(logits)).max())
        assert max(changes) > 0.1

    @pytest.mark.slow
    def test_is_what_every_sampler_samples_from(self, mixing, make, vanilla):
        """Vanilla's own samplers draw the same tokens from the same logits."""

        def ask(llama, name, processor=None, n=16):
            llama.reset()
            prompt = tokens_of(llama, QUESTIONS[1])
            return watched(llama, prompt, n, SAMPLERS[name], processor)

        def ask_all(llama):
            for name, (tokens, rows) in ours.items():
                assert ask(llama, name, rows.__getitem__)[0] == tokens, name
                _, alone = ask(llama, name, n=1)
                assert not np.array_equal(rows[0], alone[0]), name

        suite, llama, ours = mixing(), make(), {}
        for name in SAMPLERS:
            before = mixed(suite)
            ours[name] = ask(llama, name)
            assert mixed(suite) == before + len(ours[name][1]), name
        suite.deactivate()
        vanilla(ask_all)

    def test_leaves_banned_tokens_banned(self, mixing, make):
        """Tokens may be banned by another plugin or by the app's bias."""

        class Ban:
            @hookimpl(tryfirst=True)
            def llmaas_logits(self, view):
                view.logits[banned] = -np.inf

        suite = mixing()
        llama = make()
        banned = watched(llama, tokens_of(llama, QUESTIONS[0]))[0]
        assert len(set(banned)) > 6
        bias = {str(token): float("-inf") for token in banned}
        reply = llama.tokenize(said(llama, logit_bias=bias).encode(), add_bos=False)
        assert not set(banned) & set(reply)
        before = mixed(suite)
        suite.hooks.register("ban", Ban())
        tokens, rows = watched(llama, tokens_of(llama, QUESTIONS[0]))
        assert mixed(suite) > before
        assert np.isneginf(rows[:, banned]).all()
        assert not set(banned) & set(tokens)

    def test_is_mixed_once_however_often_a_row_is_sampled(self, mixing, make):
        suite = mixing()
        llama = make()
        prompt = tokens_of(llama, QUESTIONS[0])
        (token,), (row,) = watched(llama, prompt, 1)
        assert [llama.sample(temp=0.0) for _ in range(3)] == [token] * 3
        assert mixed(suite) == 1
        # Llama samples from present logits, and evaluates nothing
        (_, again) = watched(llama, prompt, 1)
        assert np.array_equal(again[0], row)

    def test_grammar_holds(self, mixing, make):
        mixing()
        llama = make()
        schema = json.dumps(NAMES)
        for question in QUESTIONS:
            grammar = LlamaGrammar.from_json_schema(schema, verbose=False)
            reply = json.loads(said(llama, question, 40, grammar=grammar))
            assert reply["name"] in ("Bruno", "Anna")


def rows_of(llama):
    """Return logits of a few tokens of each question in one array, and all tokens."""
    found = [watched(llama, tokens_of(llama, question), 6) for question in QUESTIONS]
    tokens, rows = zip(*found, strict=True)
    return list(itertools.chain(*tokens)), np.concatenate(rows)


def same(found, expected):
    return found[0] == expected[0] and np.array_equal(found[1], expected[1])


class TestVanilla:
    """Bit-identical results where nothing is to be mixed."""

    @pytest.fixture(scope="class")
    @classmethod
    def alone(cls, reference_model):
        with contextlib.closing(Llama(str(reference_model), **ENGINE)) as llama:
            return rows_of(llama)

    def test_mixing_is_seen_here(self, mixing, make, alone):
        mixing()
        assert not same(rows_of(make()), alone)

    @pytest.mark.parametrize("table", [{"alpha": 0.0}, {"skip_above": 0.0}], ids=str)
    def test_when_neighbors_have_no_weight_or_are_never_searched(self, mixing, make, alone, table):
        suite = mixing(**table)
        assert same(rows_of(make()), alone)
        report = suite.status()["plugins"]["knn_lm"]
        n_skipped = len(alone[0]) if "skip_above" in table else 0
        assert (report["skipped"], report["mixed"]) == (n_skipped, len(alone[0]) - n_skipped)

    def test_when_the_model_is_sure_enough(self, mixing, make, alone):
        """The decision is made anew for each token."""
        witness = Witness()
        suite = mixing(witness, skip_above=0.5)
        _, rows = rows_of(make())
        is_sure = [softmax(logits).max() >= 0.5 for _, logits in witness.seen]
        is_same = [
            np.array_equal(row, logits) for row, (_, logits) in zip(rows, witness.seen, strict=True)
        ]
        assert is_same == is_sure
        report = suite.status()["plugins"]["knn_lm"]
        assert report["skipped"] == sum(is_sure) > 0
        assert report["mixed"] == len(rows) - sum(is_sure) > 0

    def test_when_a_request_does_without(self, mixing, make, alone):
        suite = mixing()
        llama = make()
        ours = rows_of(llama)
        llama.reset()
        with llmaas_plugins.without("knn_lm"):
            assert same(rows_of(llama), alone)
        assert mixed(suite) == len(ours[0])
        llama.reset()
        assert same(rows_of(llama), ours)

    def test_when_a_request_that_needs_no_evaluation_does_without(self, mixing, make, alone):
        """``Llama`` samples again from present logits, which were mixed before."""
        mixing()
        llama = make()
        prompt = tokens_of(llama, QUESTIONS[0])
        ours = watched(llama, prompt, 1)
        with llmaas_plugins.without("knn_lm"):
            tokens, rows = watched(llama, prompt, 1)
            assert tokens == alone[0][:1]
            assert np.array_equal(rows, alone[1][:1])
        assert same(watched(llama, prompt, 1), ours)

    def test_names_add_up_and_are_checked(self, mixing, make, alone):
        mixing()
        llama = make()
        with llmaas_plugins.without("knn_lm"), llmaas_plugins.without("kv_chunks"):
            assert same(rows_of(llama), alone)
        with pytest.raises(UnknownPluginError, match=r"'knn'.*Did you mean 'knn_lm'"):
            llmaas_plugins.without("knn")
        with llmaas_plugins.without():
            llama.reset()
            assert not same(rows_of(llama), alone)

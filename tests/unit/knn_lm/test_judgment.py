"""A request's judgment: what it remembers of an answer is what a later prompt is judged by."""

from __future__ import annotations

import math
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from llmaas_plugins._native import logits_peek
from llmaas_plugins.knn_lm.datastore.datastore import Neighbors
from llmaas_plugins.knn_lm.mixing.evidence import Evidence
from llmaas_plugins.knn_lm.mixing.judgment import Bets, Judgment
from llmaas_plugins.knn_lm.mixing.mixer import _mix
from llmaas_plugins.knn_lm.mixing.mixture import Mixture
from llmaas_plugins.knn_lm.mixing.trust import Trust, log_gain

MIXTURE = Mixture(alpha=0.7, beta=0.25, theta=40.0, far=120.0)
DATASTORE = b"d" * 32
N_VOCAB, LOOK_BACK = 50, 8
PROMPT = np.arange(12, dtype=np.int32)


def row(seed, k=16):
    """Return random logits, and neighbors that name some tokens several times."""
    rng = np.random.default_rng(seed)
    found = Neighbors(
        rng.integers(0, N_VOCAB // 2, 16).astype(np.int32)[:k],
        rng.uniform(0, 200, 16).astype(np.float32)[:k],
        rng.uniform(0.5, 9, 16).astype(np.float32)[:k],
        np.arange(16, dtype=np.int32)[:k],
    )
    return rng.standard_normal(N_VOCAB).astype(np.float32) * 3, found


ANSWER = np.array([row(i)[1].values[0] if i % 3 else i for i in range(20)], np.int32)
"""Tokens of which neighbors name most."""


def bets(seed, k=16):
    logits, found = row(seed, k)
    return Bets.by(found, logits[found.values], logits_peek(logits))


def expected(seed, token, k=16):
    """Return the gain of a token by the logits before and after they are mixed."""
    logits, found = row(seed, k)
    mixed = logits.copy()
    _mix(mixed, found, MIXTURE, trust=1.0)
    p_mix, p_lm = (
        math.exp(float(each[token]) - logits_peek(each).log_sum_exp) for each in (mixed, logits)
    )
    return log_gain(p_mix, p_lm)


@pytest.fixture
def judging(tmp_path):
    """Return a function from a prompt to its judgment, which remembers earlier ones."""
    evidence = Evidence(tmp_path / "evidence")
    evidence.bind(DATASTORE)

    def judge(prompt, context_id=None):
        request = SimpleNamespace(tokens=prompt, context_id=context_id)
        judgment = Judgment(request, LOOK_BACK, MIXTURE, DATASTORE, evidence, bytes(32))
        judgment.recall()
        return judgment

    judge.evidence = evidence
    return judge


def answer(judgment, n_sampled, unsure=lambda _: True, k=lambda _: 16):
    """Let the judgment see the answer's rows, each with its number as its seed."""
    text = np.concatenate([PROMPT, ANSWER])
    for i in range(n_sampled):
        judgment.sampled(text[: len(PROMPT) + i], bets(i, k(i)) if unsure(i) else None)
    judgment.end()
    return text


def trust_of(gains):
    trust = Trust()
    for gain in gains:
        trust.count(gain)
    assert trust.weight > 0  # otherwise, other gains could give the same
    return pytest.approx(trust.weight, rel=1e-5)


def test_a_prompt_after_an_answer_is_judged_by_the_answer_s_rows(judging):
    text = answer(judging(PROMPT), 20)
    later = judging(text)
    assert later.trust.weight == trust_of([expected(i, ANSWER[i]) for i in range(13, 20)])
    assert later.take(31, 1, 1) == []


@pytest.mark.parametrize("n_sampled", [1, 5])
def test_any_token_may_follow_a_prompt_and_an_answer(judging, n_sampled):
    answer(judging(PROMPT), n_sampled)
    text = np.concatenate([PROMPT, ANSWER])[: len(PROMPT) + n_sampled - 1]
    before = [expected(i, ANSWER[i]) for i in range(n_sampled - 1)]
    for token in range(N_VOCAB):
        follows = np.append(text, [token, 0]).astype(np.int32)
        gains = [*before, expected(n_sampled - 1, token)]
        assert judging(follows).trust.weight == trust_of(gains)
        other = np.append(PROMPT, [token, 0]).astype(np.int32)
        assert judging(other).trust.weight == trust_of([expected(0, token)])


def test_tokens_of_which_the_model_was_sure_say_nothing(judging):
    text = answer(judging(PROMPT), 20, unsure=lambda i: i % 2)
    gains = [expected(i, ANSWER[i]) for i in range(13, 20) if i % 2]
    later = judging(text)
    assert later.trust.weight == trust_of(gains)
    assert later.take(0, 32, 32) == []


def test_rows_that_are_evaluated_again_change_nothing(judging):
    text = np.concatenate([PROMPT, ANSWER])
    judgment = judging(PROMPT)
    for i in (0, 1, 2, 2, 1, 3):
        judgment.sampled(text[: len(PROMPT) + i], bets(i))
    judgment.end()
    gains = [expected(i, ANSWER[i]) for i in range(4)]
    assert judging(np.append(text[:16], 0).astype(np.int32)).trust.weight == trust_of(gains)


@pytest.mark.parametrize("why", ["erased", "level"])
def test_what_must_not_be_remembered_is_not(judging, why):
    judgment = judging(PROMPT, "chat")
    if why == "erased":
        judgment.forget("another")
        judgment.forget("chat")
    else:
        judgment.give_up()
    for place, _ in judgment.take(0, 12, 12):
        judgment.judge(place, bets(place))
    answer(judgment, 20)
    assert len(judging.evidence) == 0


def test_a_prompt_is_judged_by_its_rows(judging):
    judgment = judging(np.concatenate([PROMPT, ANSWER]))
    places = [place for place, _ in judgment.take(0, 32, 32)]
    for place in places:
        judgment.judge(place, bets(place - len(PROMPT) + 1) if place % 3 else None)
    gains = [expected(i, ANSWER[i]) for i in range(13, 20) if (i + 11) % 3]
    assert len(places) == 7
    assert judgment.trust.weight == trust_of(gains)


def test_an_index_may_find_fewer_neighbors_or_none(judging):
    def k(i):
        return 16 - 4 * (i % 5)

    text = answer(judging(PROMPT), 20, k=k)
    gains = [expected(i, ANSWER[i], k(i)) for i in range(13, 20) if k(i)]
    later = judging(text)
    assert later.trust.weight == trust_of(gains)
    assert later.take(0, 32, 32) == []  # where none was found, nothing is to be judged either


def test_an_erasure_waits_for_gains_that_are_being_remembered(judging, monkeypatch):
    """Otherwise they would come back after the erasure."""
    evidence, judgment = judging.evidence, judging(PROMPT, "chat")
    is_keeping, is_erased, keep = threading.Event(), threading.Event(), evidence.keep

    def keep_late(*args):
        is_keeping.set()
        is_erased.wait(0.2)
        keep(*args)

    def erase():
        assert is_keeping.wait(10)
        judgment.forget("chat")
        evidence.forget("chat")
        is_erased.set()

    monkeypatch.setattr(evidence, "keep", keep_late)
    thread = threading.Thread(target=erase)
    thread.start()
    answer(judgment, 3)
    thread.join()
    assert is_erased.is_set()
    assert len(evidence) == 0

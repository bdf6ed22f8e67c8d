"""The encoder as llama.cpp runs it, in processes with and without other plugins."""

from __future__ import annotations

import itertools
import logging
import os
import signal
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from forking import in_child
from tiny_encoders import N_EMBD, N_POSITIONS, forward, prompt_of, write_package

from llmaas_hooks import ConfigError, LlmaasError, hookimpl, request_scope
from llmaas_plugins.activation import activate
from llmaas_plugins.short_prompts.encoder.body import read_body
from llmaas_plugins.short_prompts.encoder.model_file import EncoderFile, Head
from llmaas_plugins.short_prompts.encoder.outputs import Outputs
from llmaas_plugins.short_prompts.encoder.windows import windows_of
from llmaas_plugins.short_prompts.encoder.word_pieces import WordPieces
from llmaas_plugins.short_prompts.scorers.encoder import EncoderScorer

LLAMA = SimpleNamespace(n_threads_batch=1)
WORDS = ["The", " red", " bus", " leaves", " from", " platform", " 99", ".", " ", "trains", "!"]
HEAD = Head(
    np.random.default_rng(7).standard_normal((2, N_EMBD)).astype(np.float32) / 4,
    np.array([0.5, -0.5], np.float32),
)
OTHER_HEAD = Head(-HEAD.weight, HEAD.bias)


class Loads:
    """Plugin that notes which hooks of loading fire."""

    def __init__(self):
        self.seen = []

    @hookimpl
    def llmaas_model_load(self):
        self.seen.append("model")

    @hookimpl
    def llmaas_context_create(self):
        self.seen.append("context")


@pytest.fixture(scope="module")
def body(tmp_path_factory):
    return read_body(write_package(tmp_path_factory.mktemp("package")))


@pytest.fixture(scope="module")
def path(body, tmp_path_factory):
    path = tmp_path_factory.mktemp("encoder") / "encoder.gguf"
    EncoderFile.write(path, body, {}, HEAD, "F32")
    return path


@pytest.fixture
def scorer(path):
    scorer = EncoderScorer(path)
    yield scorer
    scorer.close()


def expected_chances(body, ids):
    """Return the probability of keeping each piece of one window."""
    logits = forward(body.weights, ids) @ HEAD.weight.T + HEAD.bias
    return (np.exp(logits) / np.exp(logits).sum(-1, keepdims=True))[:, 1]


def test_outputs_equal_numpys(body, path):
    outputs = Outputs(path, N_POSITIONS, 1)
    try:
        for n in (1, 7, N_POSITIONS):  # a shorter window after a longer one, too
            ids = np.random.default_rng(n).integers(0, len(body.vocabulary), n).astype(np.int32)
            found, expected = outputs.of(ids).copy(), forward(body.weights, ids)
            assert np.linalg.norm(found - expected) <= 5e-3 * np.linalg.norm(expected)
    finally:
        outputs.close()
        outputs.close()


def test_a_words_score_is_the_mean_of_its_pieces(body, scorer):
    pieces = WordPieces(body.vocabulary)
    divided = pieces.of(WORDS)
    ids = np.array([pieces.begin, *divided.ids, pieces.end], np.int32)
    chances = expected_chances(body, ids)[1:-1]
    found = scorer.scores(prompt_of(WORDS), LLAMA)
    assert found.shape == (len(WORDS),)
    assert found.dtype == np.float32
    for i, (a, b) in enumerate(itertools.pairwise(divided.starts)):
        assert found[i] == pytest.approx(chances[a:b].mean() if b > a else 0, abs=2e-3)
    assert 0 < scorer.seconds(100) == pytest.approx(10 * scorer.seconds(10))


def test_long_texts_are_read_in_windows(body, scorer):
    chance = np.random.default_rng(0)
    words = [WORDS[i] for i in chance.integers(0, len(WORDS), 300)]
    pieces = WordPieces(body.vocabulary)
    divided = pieces.of(words)
    assert len(divided.ids) > 2 * N_POSITIONS
    found = scorer.scores(prompt_of(words), LLAMA)
    assert found.shape == (300,)
    chances = np.empty(len(divided.ids))
    for window in windows_of(len(divided.ids), N_POSITIONS - 2):
        ids = [pieces.begin, *divided.ids[window.start : window.end], pieces.end]
        own = slice(window.first - window.start + 1, window.last - window.start + 1)
        chances[window.first : window.last] = expected_chances(body, np.array(ids))[own]
    for score, (a, b) in zip(found, itertools.pairwise(divided.starts), strict=True):
        assert score == pytest.approx(chances[a:b].mean() if b > a else 0, abs=2e-3)


def test_texts_without_words_have_no_scores(scorer):
    assert scorer.scores(prompt_of([]), LLAMA).shape == (0,)
    assert scorer.scores(prompt_of(["", "  "]), LLAMA).tolist() == [0, 0]


def test_threads_get_the_scores_of_their_own_texts(scorer):
    texts = [WORDS[i:] + WORDS[:i] for i in range(len(WORDS))]
    alone = [scorer.scores(prompt_of(text), LLAMA) for text in texts]
    found = {}

    def work(i):
        found[i] = scorer.scores(prompt_of(texts[i]), LLAMA)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(texts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, scores in enumerate(alone):
        np.testing.assert_array_equal(found[i], scores)


def test_a_forked_child_scores_with_one_thread(scorer):
    expected = scorer.scores(prompt_of(WORDS), SimpleNamespace(n_threads_batch=2))
    child = os.fork()
    if child == 0:
        found = scorer.scores(prompt_of(WORDS), LLAMA)
        os._exit(0 if np.array_equal(found, expected) else 1)
    assert os.waitpid(child, 0)[1] == 0
    np.testing.assert_array_equal(scorer.scores(prompt_of(WORDS), LLAMA), expected)


def test_a_forked_child_scores_with_several_threads(scorer):
    """The thread that forked cannot use OpenMP's helpers, which stayed in the parent."""
    llama = SimpleNamespace(n_threads_batch=2)
    expected = scorer.scores(prompt_of(WORDS), llama)
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(20)
        found = [scorer.scores(prompt_of(WORDS), llama) for _ in range(2)]
        scorer.close()
        os._exit(0 if all(np.array_equal(one, expected) for one in found) else 1)
    assert os.waitpid(child, 0)[1] == 0
    np.testing.assert_array_equal(scorer.scores(prompt_of(WORDS), llama), expected)


def test_a_forked_child_makes_a_scorer_of_its_own(scorer, path):
    llama = SimpleNamespace(n_threads_batch=2)
    expected = scorer.scores(prompt_of(WORDS), llama)  # this thread has OpenMP's helpers now
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(20)
        found = EncoderScorer(path).scores(prompt_of(WORDS), llama)
        os._exit(0 if np.array_equal(found, expected) else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_fork_waits_for_what_an_interrupt_left_in_a_childs_thread(scorer):
    """The child's child would have a copy of an encoder in the middle of a window."""
    words, n_asked, parent = WORDS * 100, [], os.getpid()

    def check():
        n_asked.append(1)
        if len(n_asked) == 2 and os.getpid() != parent:
            os.kill(os.getpid(), signal.SIGALRM)
        time.sleep(0.02)

    def interrupt(*_):
        raise KeyboardInterrupt

    with request_scope.checked_by(check):
        scorer.scores(prompt_of(words), LLAMA)
        n_windows = len(n_asked)
        child = os.fork()
        if child == 0:
            n_asked.clear()
            signal.signal(signal.SIGALRM, interrupt)
            try:
                scorer.scores(prompt_of(words), LLAMA)
            except KeyboardInterrupt:
                pid = os.fork()
                n_left = n_windows - len(n_asked)
                os._exit(n_left if pid == 0 else os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
            os._exit(100)
    assert n_windows > 10
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("seconds", [0.03, 0.15, 0.5])
def test_ctrl_c_while_a_fork_waits_for_the_encoder(scorer, seconds):
    """It has its effect in the parent after the fork, which waits for the encoder to the end."""
    words, is_scoring, found = WORDS * 100, threading.Event(), []

    def check():
        is_scoring.set()
        time.sleep(0.02)

    def score():
        with request_scope.checked_by(check):
            found.append(scorer.scores(prompt_of(words), LLAMA))

    def interrupt():
        time.sleep(seconds)
        os.kill(os.getpid(), signal.SIGINT)

    def works():
        return np.array_equal(scorer.scores(prompt_of(WORDS), LLAMA), expected)

    def child():
        os.write(answer, b"works" if works() else b"fails")

    expected = scorer.scores(prompt_of(WORDS), LLAMA)
    answers, answer = os.pipe()
    threads = [threading.Thread(target=work) for work in (score, interrupt)]
    with activate({"on_error": "raise", "plugins": {"short_prompts": {}}}):
        threads[0].start()
        assert is_scoring.wait(10)
        threads[1].start()
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012  it may come in either
            in_child(child)
            time.sleep(10)
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert len(found) == 1
    assert works()
    assert in_child(child) == 0
    os.close(answer)
    with os.fdopen(answers, "rb") as file:  # also of a child for which Ctrl-C did not wait
        assert file.read() == b"worksworks"


def test_an_encoder_that_was_trained_again_is_loaded_again(body, tmp_path):
    path = tmp_path / "encoder.gguf"
    EncoderFile.write(path, body, {}, HEAD)
    scorer = EncoderScorer(path)
    before, identity = scorer.scores(prompt_of(WORDS), LLAMA), scorer.identity
    np.testing.assert_array_equal(scorer.scores(prompt_of(WORDS), LLAMA), before)
    EncoderFile.write(path, body, {}, OTHER_HEAD)
    found = scorer.scores(prompt_of(WORDS), LLAMA)
    scorer.close()
    assert scorer.identity != identity
    again = EncoderScorer(path)
    np.testing.assert_array_equal(again.scores(prompt_of(WORDS), LLAMA), found)
    again.close()
    assert np.abs(found - before).max() > 0.01


def test_a_file_that_is_replaced_while_it_is_read_is_read_again(body, tmp_path, monkeypatch):
    """Otherwise the last layer would be one file's, and the layers before it another's."""
    path, read = tmp_path / "encoder.gguf", EncoderFile.read
    EncoderFile.write(path, body, {}, HEAD)
    heads = [OTHER_HEAD]

    def read_and_replace(path):
        found = read(path)
        if heads:
            EncoderFile.write(path, body, {}, heads.pop())
        return found

    monkeypatch.setattr(EncoderFile, "read", read_and_replace)
    scorer, other = EncoderScorer(path), EncoderScorer(path)
    found = scorer.scores(prompt_of(WORDS), LLAMA)
    np.testing.assert_array_equal(other.scores(prompt_of(WORDS), LLAMA), found)
    scorer.close()
    other.close()


def test_a_request_that_ends_ends_its_scoring(scorer):
    """Whoever serves the request is asked before each window."""
    n_asked = []
    words = WORDS * 100
    with request_scope.checked_by(lambda: n_asked.append(1)):
        expected = scorer.scores(prompt_of(words), LLAMA)
    assert len(n_asked) > 3
    left = [None] * 3
    with request_scope.checked_by(left.pop), pytest.raises(IndexError):
        scorer.scores(prompt_of(words), LLAMA)
    np.testing.assert_array_equal(scorer.scores(prompt_of(words), LLAMA), expected)


def test_a_closed_scorer_says_so(path):
    scorer = EncoderScorer(path)
    scorer.close()
    with pytest.raises(LlmaasError, match="is closed"):
        scorer.scores(prompt_of(WORDS), LLAMA)


def test_a_file_with_other_outputs_is_refused(body, tmp_path):
    head = Head(np.zeros((3, N_EMBD), np.float32), np.zeros(3, np.float32))
    EncoderFile.write(tmp_path / "three.gguf", body, {}, head)
    with pytest.raises(LlmaasError, match="has 3 outputs, expected 2"):
        EncoderScorer(tmp_path / "three.gguf").scores(prompt_of(WORDS), LLAMA)


def test_a_file_without_weights_is_refused(path, tmp_path):
    (tmp_path / "cut.gguf").write_bytes(path.read_bytes()[:-200_000])
    with pytest.raises(ConfigError, match="is no encoder of prompts, or is damaged"):
        EncoderScorer(tmp_path / "cut.gguf").scores(prompt_of(WORDS), LLAMA)


def test_other_plugins_do_not_notice_it(path, reference_model, make_llama, tmp_path, caplog):
    config = {
        "on_error": "raise",
        "plugins": {
            "kv_chunks": {"store": tmp_path},
            "flash_weights": {"mode": "sparse"},
            "elastic": {},
        },
    }
    with activate(config) as suite:
        scorer = EncoderScorer(path)
        with caplog.at_level(logging.DEBUG, "llmaas"):
            alone = scorer.scores(prompt_of(WORDS), LLAMA)
        assert not caplog.records
        status = suite.status()["plugins"]
        assert not any(status[name].get("left_alone") for name in status)
        scorer.close()
    again = EncoderScorer(path)
    np.testing.assert_array_equal(again.scores(prompt_of(WORDS), LLAMA), alone)
    again.close()


def test_an_apps_model_is_noticed_after_it(path, make_llama, patched):
    loads = Loads()
    patched(loads=loads)
    scorer = EncoderScorer(path)
    scorer.scores(prompt_of(WORDS), LLAMA)
    assert loads.seen == []
    llama = make_llama()
    assert loads.seen == ["model", "context"]
    assert len(llama.create_completion("The", max_tokens=2, temperature=0)["choices"]) == 1
    scorer.close()

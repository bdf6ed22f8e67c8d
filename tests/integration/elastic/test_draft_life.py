"""Drafts of contexts that share a model, and what may happen within a draft's narrow pass."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import signal
import threading

import pytest
from forking import begin, exit_code
from llama_cpp import Llama
from llama_cpp import _internals as internals
from streaming import Streamer

from llmaas_hooks import LlmaasError, PluginError, hookimpl
from llmaas_plugins import activate
from llmaas_plugins.elastic.drafting import LevelDrafter

pytestmark = pytest.mark.usefixtures("drafts_always")

N = 28
PROMPT = "User: I want to fly to Rome next Monday.\nAssistant:"
OTHER = "User: What is the weather like?\nAssistant:"
SETTINGS = {"n_ctx": 256, "n_threads": 1, "n_threads_batch": 1, "verbose": False, "n_ubatch": 1}
KEPT = 7 << 20
"""Bytes in which a level fits, but not the whole model."""


@pytest.fixture(scope="session")
def reference_model(packaged_model):
    """Return the packaged model, whose narrow levels say much of what it says."""
    return packaged_model


class Rows:
    """Counts the rows that a tap sees, and the batches that plugins see."""

    def __init__(self):
        self.taps, self.n_rows, self.n_decoded = {}, 0, 0

    @hookimpl
    def llmaas_native_context(self, context):
        self.taps[context.ctx] = context.hidden_states("ffn_input")

    @hookimpl
    def llmaas_decode(self, step):
        self.n_decoded += 1
        self.n_rows += len(self.taps[step.ctx].take())


class Shared:
    """The model of another engine, which frees it."""

    def __init__(self, model):
        self._model = model

    def __getattr__(self, name):
        return getattr(self._model, name)

    def close(self):
        pass


@contextlib.contextmanager
def streaming(model, rows=None):
    streamer = Streamer(KEPT)
    config = {"on_error": "raise", "plugins": {"elastic": {"table": "uniform"}}}
    with (
        activate(config, {"streamer": streamer, "rows": rows or Rows()}) as suite,
        contextlib.closing(Llama(str(model), **SETTINGS)) as llama,
    ):
        yield llama, suite, streamer


def beside(monkeypatch, llama):
    """Return another engine with the same model."""
    with monkeypatch.context() as patch:
        patch.setattr(internals, "LlamaModel", lambda **_: Shared(llama._model))
        return Llama(llama.model_path, **SETTINGS)


def say(llama, prompt=PROMPT, n=N):
    tokens = llama.tokenize(prompt.encode(), special=True)
    with contextlib.closing(llama.generate(tokens, temp=0.0)) as generator:
        return list(itertools.islice(generator, n))


def drafts(suite):
    (found,) = suite.status()["plugins"]["elastic"]["drafts"]
    return found


@pytest.fixture(scope="module")
def alone(model):
    """Return what the whole model says without drafts, by prompt."""
    streamer = Streamer(KEPT)
    config = {"on_error": "raise", "plugins": {"elastic": {"table": "uniform", "drafts": False}}}
    with (
        activate(config, {"streamer": streamer}),
        contextlib.closing(Llama(str(model), **SETTINGS)) as llama,
    ):
        return {prompt: say(llama, prompt) for prompt in (PROMPT, OTHER)}


@pytest.fixture
def within(monkeypatch):
    """Return a function that lets something happen within the third draft, after its first token.

    The list that it returns is filled when that has happened.
    """

    def arrange(happen):
        happened, make, n_made = [], LevelDrafter._make, itertools.count()

        def making(self, level, n_before):
            guess, n = self._guess, next(n_made)

            def guessing(level, most, pick):
                def picking(logits):
                    found = pick(logits)
                    if n == 3 and not happened:
                        happened.append(True)
                        happen()
                    return found

                return guess(level, most, picking)

            self._guess = guessing
            try:
                return make(self, level, n_before)
            finally:
                self._guess = guess

        monkeypatch.setattr(LevelDrafter, "_make", making)
        return happened

    return arrange


# -- contexts of one model ----------------------------------------------------------------------


@pytest.mark.slow
def test_two_contexts_draft_at_once(model, alone, monkeypatch):
    said = {}
    with streaming(model) as (llama, suite, _):
        with contextlib.closing(beside(monkeypatch, llama)) as other:
            threads = [
                threading.Thread(target=lambda one=one, prompt=prompt: said.update(
                    {prompt: say(one, prompt)}))
                for one, prompt in ((llama, PROMPT), (other, OTHER))
            ]  # fmt: skip
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert said == alone
        found = drafts(suite)  # of the model, not of a context
        assert found["passes"] > 10
        assert found["accepted"] > 5
        assert suite.status()["errors"] == {}


def test_a_context_drafts_on_when_another_is_closed(model, alone, monkeypatch):
    with streaming(model) as (llama, suite, streamer):
        other = beside(monkeypatch, llama)
        assert say(other, OTHER) == alone[OTHER]
        before = drafts(suite)
        other.close()
        first = streamer.contexts[0].file_weights()
        assert first.stats()["level_kept_bytes"] == first.stats()["level_bytes"] > 0
        assert say(llama) == alone[PROMPT]
        assert drafts(suite)["passes"] > before["passes"] > 0
        assert drafts(suite)["level"] == before["level"]


def test_a_new_context_starts_without_the_level_of_an_earlier_one(model, alone):
    with streaming(model) as (llama, suite, streamer):
        assert say(llama) == alone[PROMPT]
        assert streamer.stats["level_bytes"] > 0
        llama._ctx.close()
        assert suite.status()["plugins"]["elastic"]["drafts"] == []
        llama._ctx = internals.LlamaContext(
            model=llama._model, params=llama.context_params, verbose=False
        )
        llama.reset()
        say(llama, n=2)  # tokens without drafts are timed first
        assert drafts(suite)["phase"] == "measuring"
        assert streamer.stats["level_bytes"] == 0
        assert say(llama) == alone[PROMPT]
        assert drafts(suite)["passes"] > 0


@pytest.mark.slow
def test_another_context_computes_within_a_draft(model, alone, monkeypatch, within):
    said = []
    with streaming(model) as (llama, suite, _):
        with contextlib.closing(beside(monkeypatch, llama)) as other:

            def happen():
                thread = threading.Thread(target=lambda: said.append(say(other, OTHER)))
                thread.start()
                thread.join()

            happened = within(happen)
            assert say(llama) == alone[PROMPT]
        assert happened
        assert said == [alone[OTHER]]
        assert suite.status()["errors"] == {}


def test_less_memory_for_one_context_within_the_draft_of_another(model, alone, within):
    """The level goes while a draft of it is made; its next tokens are read."""
    with streaming(model) as (llama, suite, streamer):
        happened = within(lambda: streamer.contexts[0].file_weights().set_memory(1 << 20, 1 << 20))
        assert say(llama) == alone[PROMPT]
        assert happened
        assert drafts(suite)["level"] is None


# -- within a narrow pass -----------------------------------------------------------------------


def goes_on(llama, rows, streamer, alone):
    """Check that the engine is as if nothing had happened."""
    assert streamer.contexts[0].level == 0
    n_rows, n_decoded = rows.n_rows, rows.n_decoded
    assert say(llama) == alone[PROMPT]
    assert rows.n_decoded > n_decoded
    assert rows.n_rows - n_rows >= rows.n_decoded - n_decoded


def test_ctrl_c_within_a_draft(model, alone, within):
    rows = Rows()
    with streaming(model, rows) as (llama, suite, streamer):
        within(lambda: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            say(llama)
        assert llama.draft_model is None
        goes_on(llama, rows, streamer, alone)
        assert suite.status()["errors"] == {}


@pytest.mark.slow
def test_a_request_of_another_thread_within_a_draft(model, alone, within):
    """It takes the engine, which serves one request at a time: the draft ends, and leaves nothing.

    Its own tokens are computed by the whole model, in cells that later requests may use.
    """
    rows, said, levels = Rows(), [], []
    with streaming(model, rows) as (llama, suite, streamer):

        def ask():
            said.append(say(llama, OTHER))
            levels.append(streamer.contexts[0].level)

        def happen():
            thread = threading.Thread(target=ask)
            thread.start()
            thread.join(60)

        happened = within(happen)
        with pytest.raises(LlmaasError, match="another request began on this Llama") as raised:
            say(llama)
        assert happened
        assert (said, levels) == ([alone[OTHER]], [0])
        assert llama.draft_model is None
        assert say(llama, OTHER) == alone[OTHER]
        goes_on(llama, rows, streamer, alone)
        assert not isinstance(raised.value, PluginError)  # no plugin is to blame
        assert suite.status()["errors"] == {}


def test_the_collector_within_a_draft(model, alone, monkeypatch, within):
    """It ends a request of another engine, and frees that engine, in the middle of the pass."""
    rows = Rows()
    with streaming(model, rows) as (llama, suite, streamer):
        ring = [beside(monkeypatch, llama)]
        ring.append(ring)
        generator = ring[0].generate([1, 300, 301], temp=0.0)
        next(generator)
        ring.append(generator)
        del generator
        held = [ring]
        del ring

        def happen():
            held.clear()
            gc.collect()

        happened = within(happen)
        assert say(llama) == alone[PROMPT]
        assert happened
        suite.settle()
        goes_on(llama, rows, streamer, alone)
        assert suite.status()["errors"] == {}


def test_a_fork_within_a_draft(model, alone, within):
    """Both processes go on with the draft."""
    with streaming(model) as (llama, *_):
        children = []
        within(lambda: children.append(os.fork()))
        said = None
        try:
            said = say(llama)
        finally:
            if children == [0]:
                os._exit(0 if said == alone[PROMPT] else 1)
        assert said == alone[PROMPT]
        assert exit_code(children[0]) == 0


@pytest.mark.slow
def test_a_fork_of_another_thread_within_a_draft(model, alone, within):
    """The child lacks the thread that drafts; its own request sees and says what it should."""
    rows, codes = Rows(), []
    with streaming(model, rows) as (llama, _, streamer):

        def child():
            goes_on(llama, rows, streamer, alone)

        def happen():
            thread = threading.Thread(target=lambda: codes.append(exit_code(begin(child, 60))))
            thread.start()
            thread.join()

        happened = within(happen)
        assert say(llama) == alone[PROMPT]
        assert happened
        assert codes == [0]
        goes_on(llama, rows, streamer, alone)

"""Drafts by a narrow level of a streamed model: the same text in fewer passes, and no trace."""

from __future__ import annotations

import contextlib
import ctypes
import itertools

import numpy as np
import pytest
from budgets import make_room, squeeze
from llama_cpp import Llama, llama_cpp
from packed_models import pack
from streaming import Streamer

from llmaas_hooks import PluginError, hookimpl, serving_context
from llmaas_plugins import activate, elastic, without
from llmaas_plugins.elastic.drafting import MOST, LevelDrafter
from llmaas_plugins.memory import recent

pytestmark = pytest.mark.usefixtures("drafts_always")

N = 40
PROMPT = "User: I want to fly to Rome next Monday.\nAssistant:"
SETTINGS = {"n_ctx": 256, "n_threads": 1, "n_threads_batch": 1, "verbose": False}
ONE_BY_ONE = {"n_ubatch": 1}
"""The same kernels for every batch, so that drafts change no bit of the logits."""
KEPT = 7 << 20
"""Bytes in which a level fits, but not the whole model."""


@pytest.fixture(scope="session")
def reference_model(packaged_model):
    """Return the packaged model, whose narrow levels say much of what it says."""
    return packaged_model


@contextlib.contextmanager
def streaming(model, *plugins, kept=KEPT, on_error="raise", tables=(), **table):
    """Open the model with ``kept`` bytes in memory; yield engine, suite and streamer."""
    streamer, listed = Streamer(kept), {"elastic": {"table": "uniform"} | table}
    config = {"on_error": on_error, "plugins": listed | dict(tables)}
    more = {"streamer": streamer} | {f"more{i}": one for i, one in enumerate(plugins)}
    with (
        activate(config, more) as suite,
        contextlib.closing(Llama(str(model), **SETTINGS, **ONE_BY_ONE)) as llama,
    ):
        yield llama, suite, streamer


def say(llama, n=N, prompt=PROMPT, **sampling):
    tokens = llama.tokenize(prompt.encode(), special=True)
    generator = llama.generate(tokens, **({"temp": 0.0} | sampling))
    with contextlib.closing(generator):
        return list(itertools.islice(generator, n))


def drafts(suite):
    (found,) = suite.status()["plugins"]["elastic"]["drafts"]
    return found


@pytest.fixture(scope="module")
def alone(model):
    """Return what the whole model says without drafts."""
    with streaming(model, drafts=False) as (llama, *_):
        return say(llama)


class Passes:
    """Counts the batches of a ``Llama``."""

    def __init__(self, llama):
        self.n, self._eval = 0, llama.eval
        llama.eval = self._count

    def _count(self, tokens):
        self.n += 1
        self._eval(tokens)


def test_the_text_is_the_same_in_fewer_passes(model, alone):
    with streaming(model) as (llama, suite, streamer):
        passes = Passes(llama)
        assert say(llama) == alone
        assert llama.draft_model is None
        found = drafts(suite)
        assert found["accepted"] > 5
        assert N - found["accepted"] - MOST <= passes.n <= N - found["accepted"]
        n_bytes = streamer.stats["level_bytes"]
        assert streamer.stats["level_kept_bytes"] == n_bytes <= KEPT
        owners = {one["owner"]: one for one in suite.status()["memory"]["owners"]}
        level = owners["level that drafts"]
        assert (level["bytes"], level["kind"]) == (n_bytes, "movable")
        assert streamer.stats["kept_bytes"] < streamer.stats["bytes"]
        assert suite.status()["errors"] == {}


@pytest.mark.slow
def test_the_level_tried_is_worth_the_waits_of_all_passes_without_drafts(model, monkeypatch):
    time_s = recent.TIME_S
    monkeypatch.setattr(recent, "TIME_S", 1e9)  # nothing counts less because it is older
    with streaming(model) as (llama, suite, _):
        passes = Passes(llama)
        say(llama)
        (found,) = suite.plugin("elastic")._drafts.values()
        claim, n_passes = found.memory.claim(), passes.n + drafts(suite)["accepted"]
        saved_s = claim.taken * found._waits.byte_s * n_passes / time_s
        assert claim.saved == ((0, 0.0), (claim.most, pytest.approx(saved_s, rel=1e-3)))


def test_sampling_with_a_seed_gives_the_same_tokens(model):
    said = []
    for is_on in (False, True):
        with streaming(model, drafts=is_on) as (llama, suite, _):
            llama.set_seed(7)
            said.append(say(llama, temp=0.9, top_k=0, top_p=1.0))
            if is_on:
                assert drafts(suite)["accepted"] > 0
    assert said[0] == said[1]


class Observer:
    """Records what plugins see: batches, sampled rows, and rows of a tap."""

    def __init__(self):
        self.batches, self.rows, self.levels, self.tap = [], 0, [], None

    @hookimpl
    def llmaas_native_context(self, context):
        self.context, self.tap = context, context.hidden_states("ffn_input")

    @hookimpl
    def llmaas_decode(self, step):
        self.batches.append(step.n_tokens)
        self.levels.append(self.context.level)
        self.rows += len(self.tap.take())

    @hookimpl
    def llmaas_request_end(self, stats):
        self.stats = stats

    @property
    def n_outputs(self):
        """Number of tokens with logits: of a prompt, the last one."""
        return sum(n if n <= MOST + 1 else 1 for n in self.batches)


def test_plugins_see_the_verified_batches_only(model, alone):
    seen = Observer()
    with streaming(model, seen) as (llama, suite, _):
        assert say(llama) == alone
        found = drafts(suite)
        n_prompt = len(llama.tokenize(PROMPT.encode(), special=True))
        assert found["passes"] > 5
        # a draft that was verified after the last token was taken is not counted yet
        assert 0 <= sum(seen.batches) - (n_prompt + N - 1 + found["proposed"]
                                         - found["accepted"]) <= MOST  # fmt: skip
        assert seen.rows == seen.n_outputs
        assert set(seen.levels) == {0}
        assert seen.stats.n_generated == N


def cells(llama):
    """Return the bytes of sequence 0's state."""
    n = llama_cpp.llama_state_seq_get_size(llama.ctx, 0)
    state = np.empty(n, np.uint8)
    pointer = state.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
    assert llama_cpp.llama_state_seq_get_data(llama.ctx, pointer, n, 0) == n
    return state.tobytes()


def test_cells_are_those_without_drafts(model):
    found = []
    for is_on in (False, True):
        with streaming(model, drafts=is_on) as (llama, _, _):
            say(llama)
            found.append((llama._input_ids.tolist(), cells(llama)))
    assert found[0] == found[1]


@pytest.mark.slow
def test_kv_chunks_saves_and_restores_the_same(model, tmp_path):
    said = []
    for is_on in (False, True):
        table = {"codec": "lossless", "recompute": False, "parked_tokens": 0}
        kv = {"kv_chunks": table | {"store": str(tmp_path / str(is_on))}}
        with streaming(model, drafts=is_on, tables=kv) as (llama, suite, _):
            texts = []
            for name in "abab":
                with serving_context(name):
                    texts.append(say(llama, prompt=PROMPT * (2 if name == "a" else 1)))
            status = suite.status()["plugins"]
            said.append((texts, status["kv_chunks"]["restores"]))
            if is_on:
                assert status["elastic"]["drafts"][0]["accepted"] > 0
    assert said[0] == said[1]
    assert said[0][1] > 0


@pytest.mark.slow
def test_only_the_whole_model_gets_drafts(model):
    with streaming(model) as (llama, suite, streamer):
        with elastic.level(0.9):
            say(llama)
        assert drafts(suite)["passes"] == 0
        with without("elastic"):
            say(llama)
        assert drafts(suite)["passes"] == 0
        with elastic.level(prefill=0.9, decode=1.0):
            said = say(llama)
        assert drafts(suite)["passes"] > 0
        assert streamer.contexts[-1].level == 0
    with streaming(model, drafts=False) as (llama, _, _), elastic.level(prefill=0.9, decode=1.0):
        assert say(llama) == said


def test_a_level_that_does_not_fit_makes_no_drafts_and_says_why(model, alone):
    with streaming(model, kept=1 << 20) as (llama, suite, streamer):
        assert say(llama) == alone
        found = drafts(suite)
        assert (found["passes"], found["phase"]) == (0, "resting")
        assert "of weights may be kept" in found["obstacle"]
        assert streamer.stats["level_bytes"] == 0


def test_less_memory_ends_drafts_within_the_answer(model, alone):
    with streaming(model) as (llama, suite, streamer):
        tokens = llama.tokenize(PROMPT.encode(), special=True)
        with contextlib.closing(llama.generate(tokens, temp=0.0)) as generator:
            said = list(itertools.islice(generator, 20))
            assert drafts(suite)["level"] is not None
            streamer.contexts[-1].file_weights().set_memory(1 << 20, 1 << 20)
            said += itertools.islice(generator, N - 20)
        assert said == alone
        assert drafts(suite)["level"] is None
        assert streamer.stats["kept_bytes"] <= 1 << 20


@pytest.mark.parametrize("on_error", ["log", "raise"])
def test_a_failing_drafter_leaves_the_engine_as_it_was(model, alone, monkeypatch, on_error):
    seen, propose = Observer(), LevelDrafter._make

    def failing(self, level, n_before):
        guess = self._guess

        def broken(level, most, pick):
            def odd(logits):
                if n_before > 40:
                    raise ZeroDivisionError
                return pick(logits)

            return guess(level, most, odd)

        self._guess = broken
        try:
            return propose(self, level, n_before)
        finally:
            self._guess = guess

    monkeypatch.setattr(LevelDrafter, "_make", failing)
    with streaming(model, seen, on_error=on_error) as (llama, suite, _):
        if on_error == "raise":
            with pytest.raises(PluginError, match="'elastic' failed in llmaas_draft"):
                say(llama)
            assert llama.draft_model is None
        else:
            assert say(llama) == alone
            assert suite.status()["errors"]["elastic"]["llmaas_draft"]["count"] == 1
        assert seen.context.level == 0
        monkeypatch.undo()
        assert say(llama)[:8] == alone[:8]
        assert seen.rows == seen.n_outputs


def test_nothing_is_left_when_the_suite_ends_within_an_answer(model, alone):
    streamer = Streamer(KEPT)
    suite = activate({"plugins": {"elastic": {"table": "uniform"}}}, {"streamer": streamer})
    with contextlib.closing(Llama(str(model), **SETTINGS, **ONE_BY_ONE)) as llama:
        generator = llama.generate(llama.tokenize(PROMPT.encode(), special=True), temp=0.0)
        said = list(itertools.islice(generator, 30))
        suite.deactivate()
        assert said == alone[:30]
        said += itertools.islice(generator, 5)
        generator.close()
        assert llama.draft_model is None


def test_a_model_in_memory_gets_no_drafts(model):
    config = {"on_error": "raise", "plugins": {"elastic": {"table": "uniform"}}}
    with activate(config) as suite, contextlib.closing(Llama(str(model), **SETTINGS)) as llama:
        say(llama)
        assert [one["passes"] for one in suite.status()["plugins"]["elastic"]["drafts"]] in (
            [], [0],
        )  # fmt: skip


@pytest.mark.slow
def test_with_flash_weights(model, alone):
    pack(model)
    flash = {"flash_weights": {"memory_budget": "1 MiB", "arena": "1 MiB"}}
    config = {"on_error": "raise", "plugins": {"elastic": {"table": "uniform"}} | flash}
    with activate(config) as suite:
        make_room(suite.plugin("flash_weights"))
        with contextlib.closing(Llama(str(model), **SETTINGS, **ONE_BY_ONE)) as llama:
            squeeze(suite.plugin("flash_weights"), 7)
            assert say(llama) == alone
            assert suite.status()["errors"] == {}

"""An interrupted request stays in the app's own cells, if these have room."""

from __future__ import annotations

import contextlib
import ctypes
import threading

import llama_cpp
import numpy as np
import pytest
from llama_cpp import Llama

from llmaas_hooks import PluginError, hookimpl
from llmaas_hooks.request_scope import serving_context
from llmaas_plugins import activate
from llmaas_plugins.activation import active_suite
from llmaas_plugins.kv_chunks.store.chunk_ids import chain

RNG = np.random.default_rng(5)
LONG = [1, *RNG.integers(300, 4000, 299).tolist()]
SHORT = [1, *RNG.integers(300, 4000, 39).tolist()]
N_ANSWER = 12
FLASH = {"no flash attention": False, "flash attention": True}


class Gone(BaseException):
    """The caller of a request left."""


class Interrupter:
    """Plugin that makes a request of another app before some tokens of an answer.

    Attributes:
        at: Numbers of those tokens.
        ask: Function that makes the request.
        leaves: Whether the first request's caller leaves after that.
        rows: Logits that the first request's tokens were sampled from, and the other ones'.
    """

    def __init__(self):
        self.at, self.ask, self.leaves = (), None, False
        self.rows, self.other_rows = [], []
        self.n_turns, self.is_other = 0, False

    @hookimpl
    def llmaas_turn(self, n_left):
        if self.is_other or n_left:
            return
        self.n_turns += 1
        if self.n_turns in self.at:
            self.is_other = True
            thread = threading.Thread(target=self.ask)
            thread.start()
            thread.join()
            self.is_other = False
            if self.leaves:
                raise Gone

    @hookimpl(trylast=True)
    def llmaas_logits(self, view):
        (self.other_rows if self.is_other else self.rows).append(view.logits.copy())


@contextlib.contextmanager
def opened(model, tmp_path, n_ctx=1024, **settings):
    """Open an engine with kv_chunks; yield it and its interrupter."""
    plugin = Interrupter()
    flash = settings.pop("flash_attn", False)
    table = {"store": str(tmp_path / "kv"), "recompute": False} | settings
    engine = {"n_ctx": n_ctx, "n_threads": 1, "verbose": False, "flash_attn": flash}
    with (
        activate({"on_error": "raise", "plugins": {"kv_chunks": table}}, {"interrupter": plugin}),
        contextlib.closing(Llama(str(model), **engine)) as llama,
    ):
        plugin.ask = lambda: ask(llama, "other", SHORT, 4)
        yield llama, plugin


def ask(llama, app, prompt, n):
    with serving_context(None, app):
        stream = llama.generate(prompt, temp=0.0)
        found = [next(stream) for _ in range(n)]
        stream.close()
    return found


def answer(llama, plugin, at=()):
    """Return an answer of a new app, whose prompt is stored nowhere; ``plugin`` has its logits."""
    plugin.at, plugin.n_turns = at, 0
    plugin.rows, plugin.other_rows = [], []
    return ask(llama, f"app {RNG.integers(1 << 60)}", LONG, N_ANSWER)


def stats():
    return active_suite().status()["plugins"]["kv_chunks"]


@pytest.mark.parametrize("flash", FLASH.values(), ids=FLASH)
def test_lossless_answers_have_the_same_bits_on_both_sides(reference_model, tmp_path, flash):
    settings = {"codec": "lossless", "flash_attn": flash}
    with opened(reference_model, tmp_path / "alone", **settings) as (llama, plugin):
        answer(llama, plugin)
        expected = plugin.rows
    with opened(reference_model, tmp_path / "other", **settings) as (llama, plugin):
        plugin.is_other = True
        ask(llama, "other", SHORT, 4)
        other = plugin.other_rows
    with opened(reference_model, tmp_path / "both", **settings) as (llama, plugin):
        answer(llama, plugin, at=(2, 3, 7))
        np.testing.assert_array_equal(plugin.rows, expected)
        np.testing.assert_array_equal(plugin.other_rows[: len(other)], other)
        assert len(plugin.other_rows) == 3 * len(other)
        assert stats()["takes"] == 3
        assert stats()["parked_given_up"] == 0


@pytest.mark.parametrize("flash", FLASH.values(), ids=FLASH)
def test_lossless_requests_share_no_part_of_an_interrupted_one(reference_model, tmp_path, flash):
    """Its other cells would be behind those of the interrupted request, so last bits differed."""
    settings = {"codec": "lossless", "flash_attn": flash}
    prompt = [*LONG[:20], *SHORT[1:], *LONG[:150]]
    with opened(reference_model, tmp_path / "alone", **settings) as (llama, plugin):
        plugin.is_other = True
        ask(llama, "third", prompt, 4)
        expected = plugin.other_rows
    with opened(reference_model, tmp_path / "both", **settings) as (llama, plugin):

        def use():
            ask(llama, "other", SHORT, 4)
            plugin.other_rows = []
            ask(llama, "first", prompt, 4)

        plugin.ask, plugin.at = use, (3,)
        ask(llama, "first", LONG, N_ANSWER)
        np.testing.assert_array_equal(plugin.other_rows, expected)
        assert stats()["takes"] == 1


def test_lossless_requests_stay_in_cells_after_one_that_was_given_up(reference_model, tmp_path):
    """The next one is restored once, and finds the first cells free."""
    with opened(reference_model, tmp_path, codec="lossless") as (llama, plugin):
        expected = answer(llama, plugin)
        plugin.leaves = True
        with pytest.raises(Gone):
            answer(llama, plugin, at=(3,))
        plugin.leaves = False
        assert stats()["parked_contexts"] == 1
        assert stats()["parked_cells"] == 512  # rounded up
        assert answer(llama, plugin, at=(2, 4, 7)) == expected
        assert stats()["takes"] == 2


def test_a_lossless_request_comes_back_to_its_cells_while_another_one_waits(
    reference_model, tmp_path
):
    with opened(reference_model, tmp_path, codec="lossless") as (llama, plugin):
        expected = answer(llama, plugin)
        waits, is_over, turns = threading.Event(), threading.Event(), []

        class Waiter:
            @hookimpl
            def llmaas_turn(self, request):
                turns.append(request.app)
                if turns.count("other") == 3 and request.app == "other":
                    waits.set()
                    assert is_over.wait(60)

        active_suite().hooks.register("waiter", Waiter())
        other = threading.Thread(target=ask, args=(llama, "other", SHORT, 6))

        def use():
            other.start()
            assert waits.wait(60)

        plugin.ask = use
        assert answer(llama, plugin, at=(3,)) == expected
        assert stats()["takes"] == 1
        is_over.set()
        other.join()


@pytest.mark.parametrize("flash", FLASH.values(), ids=FLASH)
def test_lossless_requests_leave_a_place_behind_freed_cells(reference_model, tmp_path, flash):
    """Otherwise later tokens would lie before earlier ones."""
    settings = {"codec": "lossless", "flash_attn": flash}

    def use(llama, plugin):
        ask(llama, "other", SHORT, 4)
        active_suite().evict("nothing")  # frees what is parked
        plugin.other_rows = []
        ask(llama, "other", [*SHORT, *LONG[1:100]], 4)

    with opened(reference_model, tmp_path / "alone", **settings) as (llama, plugin):
        plugin.is_other = True
        use(llama, plugin)
        expected = plugin.other_rows
    with opened(reference_model, tmp_path / "both", **settings) as (llama, plugin):
        plugin.ask = lambda: use(llama, plugin)
        answer(llama, plugin, at=(3,))
        np.testing.assert_array_equal(plugin.other_rows, expected)
        assert stats()["takes"] == 0


def test_a_request_that_fails_at_once_moves_no_cells(reference_model, tmp_path):
    class Failing:
        @hookimpl
        def llmaas_request_begin(self, request):
            if request.app == "failing":
                raise ValueError("no such app")

    with opened(reference_model, tmp_path, codec="lossless") as (llama, plugin):
        active_suite().hooks.register("failing", Failing())
        expected = answer(llama, plugin)
        failures = []

        def use():
            try:
                ask(llama, "failing", SHORT, 4)
            except PluginError as error:
                failures.append(error)

        plugin.ask = use
        assert answer(llama, plugin, at=(2, 5)) == expected
        assert len(failures) == 2
        assert (stats()["restores"], stats()["parks"]) == (0, 0)


@pytest.mark.parametrize("codec", ["tolerance", "int8"])
def test_lossy_codecs_change_nothing_of_what_stays_in_the_cells(reference_model, tmp_path, codec):
    with opened(reference_model, tmp_path, codec=codec) as (llama, plugin):
        answer(llama, plugin)
        expected = plugin.rows
        before = stats()["saves"]
        answer(llama, plugin, at=(2, 3, 7))
        np.testing.assert_array_equal(plugin.rows, expected)
        assert stats()["takes"] == 3
        # the first interruption saves the prompt; others save only what interrupts, and the end
        assert stats()["saves"] - before == 1 + 3 + 1


@pytest.mark.parametrize("codec", ["tolerance", "lossless"])
def test_without_room_an_interrupted_request_is_restored(reference_model, tmp_path, codec):
    with opened(reference_model, tmp_path, n_ctx=512, codec=codec) as (llama, plugin):
        plugin.ask = lambda: ask(llama, "other", [*SHORT, *LONG[:150]], 2)
        expected = answer(llama, plugin)
        found = answer(llama, plugin, at=(2, 3, 7))
        assert found == expected or codec == "tolerance"
        assert stats()["takes"] == 0
        assert stats()["restores"] >= 3


def test_a_longer_prompt_leaves_no_room_for_cells_that_were_not_saved(reference_model, tmp_path):
    """They are saved before they are lost, so that none is evaluated again."""
    with opened(reference_model, tmp_path, n_ctx=512, codec="lossless") as (llama, plugin):
        expected = answer(llama, plugin)
    with opened(reference_model, tmp_path, n_ctx=512, codec="int8") as (llama, plugin):
        prompts = iter([SHORT, [1, *RNG.integers(300, 4000, 250).tolist()]])
        plugin.ask = lambda: ask(llama, "other", next(prompts), 2)
        steps = []
        real = llama.eval
        llama.eval = lambda tokens: (steps.append((plugin.is_other, len(tokens))), real(tokens))
        before = stats()["saves"]
        found = answer(llama, plugin, at=(2, 5))
        assert stats()["saves"] - before == 2 + 2 + 1  # interruptions, what interrupts, the end
        assert stats()["takes"] == 1
        assert len(found) == len(expected)
        assert steps.count((False, 1)) == N_ANSWER - 1  # each token of the answer once


def test_an_answer_that_needs_the_cells_gets_them(reference_model, tmp_path):
    with opened(reference_model, tmp_path, n_ctx=768, codec="lossless") as (llama, plugin):
        expected = answer(llama, plugin)
        alone = ask(llama, "alone", SHORT, 300)
        found = []
        plugin.ask = lambda: found.append(ask(llama, "other", SHORT, 300))
        assert answer(llama, plugin, at=(3, 6)) == expected
        assert found == [alone, alone]
        assert stats()["parked_given_up"] == 2


def test_after_cells_were_lost_requests_are_saved_at_each_interruption(reference_model, tmp_path):
    """So no token of theirs is evaluated again."""
    with opened(reference_model, tmp_path, n_ctx=512, codec="int8") as (llama, plugin):
        n_saves = stats()["saves"]
        steps = []
        real = llama.eval
        llama.eval = lambda tokens: (steps.append((plugin.is_other, len(tokens))), real(tokens))
        plugin.ask = lambda: ask(llama, "other", SHORT, 200)
        answer(llama, plugin, at=(2, 4, 6))
        assert stats()["parked_given_up"] == 3
        assert stats()["saves"] - n_saves == 3 + 3 + 1
        assert steps.count((False, 1)) == N_ANSWER - 1


def n_scores(llama, app, tokens):
    """Return how many scores of attention are stored for these tokens of an app."""
    memory = llama_cpp.llama_get_memory(llama.ctx)
    llama_cpp.llama_memory_seq_pos_max(memory, 0)  # waits until the request is saved
    (transfer,) = active_suite().plugin("kv_chunks")._all_transfers()
    chunks = transfer._store.find(chain(transfer._root(app), np.array(tokens, dtype=np.int32)))
    return sum(chunk.n_scores for chunk in chunks)


def test_attention_is_counted_on(reference_model, tmp_path):
    """Interruptions lose none of the counts by which the bits of chunks are chosen."""
    found = []
    with opened(reference_model, tmp_path, codec="tolerance") as (llama, plugin):
        for app, at in ("whole", ()), ("interrupted", (4, 5, 9)):
            plugin.at, plugin.n_turns = at, 0
            said = ask(llama, app, LONG[:120], N_ANSWER)  # the prompt is not saved until the end
            found.append(n_scores(llama, app, [*LONG[:120], *said[:-1]]))
        assert stats()["takes"] == 3
    assert found[1] == pytest.approx(found[0], rel=0.01)


def test_attention_is_counted_on_for_each_app(reference_model, tmp_path):
    """Two interrupted requests of two apps have the same tokens."""
    prompt = LONG[:120]
    with opened(reference_model, tmp_path, codec="tolerance") as (llama, plugin):
        said = ask(llama, "whole", prompt, N_ANSWER)
        tokens = [*prompt, *said[:-1]]
        expected = n_scores(llama, "whole", tokens)

        def interrupted_too():
            plugin.ask = lambda: ask(llama, "other", SHORT, 4)
            plugin.is_other, plugin.n_turns = False, 0
            assert ask(llama, "second", prompt, N_ANSWER) == said

        plugin.ask, plugin.at, plugin.n_turns = interrupted_too, (4,), 0
        assert ask(llama, "first", prompt, N_ANSWER) == said
        assert stats()["takes"] == 2
        for app in "first", "second":
            assert n_scores(llama, app, tokens) == pytest.approx(expected, rel=0.01)


class Uses:
    """Things that an app may do itself while its request waits."""

    @staticmethod
    def a_batch_of_its_own(llama):
        llama.reset()
        llama.eval(SHORT * 12)

    @staticmethod
    def a_raw_batch(llama):
        tokens = (ctypes.c_int32 * len(SHORT))(*SHORT)
        batch = llama_cpp.llama_batch_get_one(tokens, len(SHORT))
        assert llama_cpp.llama_decode(llama.ctx, batch) == 0

    @staticmethod
    def a_saved_sequence(llama):
        llama.reset()
        llama.eval(SHORT)
        size = llama_cpp.llama_state_seq_get_size(llama.ctx, 0)
        state = (ctypes.c_uint8 * size)()
        assert llama_cpp.llama_state_seq_get_data(llama.ctx, state, size, 0) == size
        assert llama_cpp.llama_state_seq_set_data(llama.ctx, state, size, 0) == size

    @staticmethod
    def a_saved_state(llama):
        llama.load_state(llama.save_state())


@pytest.mark.parametrize("name", [name for name in vars(Uses) if not name.startswith("_")])
def test_the_app_may_use_the_engine_meanwhile(reference_model, tmp_path, name):
    with opened(reference_model, tmp_path, n_ctx=512, codec="lossless") as (llama, plugin):
        expected = answer(llama, plugin)

        def use():
            ask(llama, "other", SHORT, 2)
            getattr(Uses, name)(llama)

        plugin.ask = use
        assert answer(llama, plugin, at=(3, 6)) == expected


def test_without_interruptions_nothing_is_parked(reference_model, tmp_path):
    with opened(reference_model, tmp_path, codec="tolerance") as (llama, plugin):
        answer(llama, plugin)
        ask(llama, "other", SHORT, 2)
        assert stats()["parks"] == 0

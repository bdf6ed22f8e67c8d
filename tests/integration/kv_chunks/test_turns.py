"""A request that others interrupt answers as the same request without interruptions."""

from __future__ import annotations

import threading

import pytest
from forking import in_child
from interrupted import N_PIECE, OTHER, Turns, check_interruptions, opened
from llama_cpp import StoppingCriteriaList
from preparing import prepare
from switching import PROMPT

from llmaas_hooks import Levels, PluginError, hookimpl
from llmaas_hooks.request_scope import serving_context
from llmaas_plugins import elastic, without
from llmaas_plugins.activation import active_suite


@pytest.mark.parametrize("settings", [{}, {"parked_tokens": 1024}], ids=["stored", "parked"])
def test_hook_llmaas_turn_interrupts_without_a_trace(reference_model, tmp_path, settings):
    with opened(reference_model, tmp_path, settings) as turns:
        left = check_interruptions(turns)
        assert left == [*range(len(PROMPT), 0, -N_PIECE), *[0] * 11]
        assert turns.requests == [*["other"] * len(left), turns.requests[-1]]


class Saves:
    """Listener that notes which requests are over when they are saved."""

    found = ()

    @hookimpl
    def llmaas_kv_save(self, request, is_over):
        self.found += ((request.app == "other", is_over),)


def test_interrupted_requests_are_saved_before_they_are_over(reference_model, tmp_path):
    with opened(reference_model, tmp_path, extra=Saves()) as turns:
        turns.answer([1, 4])
        assert turns.extra.found == ((False, False), (True, True)) * 2 + ((False, True),)


@pytest.mark.parametrize(("parked", "n_saves"), [(0, 5), (1024, 3)])
def test_parked_cells_are_not_saved_at_each_interruption(
    reference_model, tmp_path, parked, n_saves
):
    """The other requests are saved, and the whole one at its end."""
    at = [len(PROMPT) // N_PIECE + 2 + k for k in range(2)]
    with opened(reference_model, tmp_path, {"parked_tokens": parked}) as turns:
        expected = turns.answer()
        before = kv_chunks()
        assert turns.answer(at) == expected
        after = kv_chunks()
        assert after["saves"] - before["saves"] == n_saves
        n_other = -(-(len(OTHER) + 5) // 16)
        assert after["chunks"] == 2 * before["chunks"] + n_other


def kv_chunks():
    """Return the plugin's report."""
    return active_suite().status()["plugins"]["kv_chunks"]


def test_hook_llmaas_request_resume(reference_model, tmp_path):
    class Resumed:
        found = ()

        @hookimpl
        def llmaas_request_resume(self, request, levels, n_generated):
            self.found += ((request.app, len(request.tokens), levels, n_generated),)

    with opened(reference_model, tmp_path, extra=Resumed()) as turns:
        turns.answer([1, 4, 5, 9])
        app = turns.requests[-1]
        n = len(PROMPT)
        assert turns.extra.found == ((app, n, None, 0), *((app, n, None, k) for k in (0, 1, 5)))


def test_answers_go_on_at_their_levels(reference_model, tmp_path):
    model = prepare(reference_model, tmp_path / "model.gguf", tables=("uniform",))
    with opened(model, tmp_path, elastic={}) as turns:
        whole = turns.answer()
        with elastic.level(prefill=0.4, decode=0.8):
            check_interruptions(turns)
        assert turns.answer(range(40)) == whole


class Chooser:
    """Plugin that chooses the level of an answer late, by the callback of this name."""

    def __init__(self, name):
        self.name, self.asked = name, ()

    @hookimpl
    def llmaas_level(self, request):
        if request.app != "other":
            return Levels(prefill=0.4, decode=1.0, **{self.name: self.choose})
        return None

    def choose(self, about):
        self.asked += (about if isinstance(about, int) else None,)  # no logits
        return 0.5


def test_answers_go_on_at_the_level_of_their_first_token(reference_model, tmp_path):
    model = prepare(reference_model, tmp_path / "model.gguf", tables=("uniform",))
    chooser = Chooser("at_first_token")
    with opened(model, tmp_path, extra=chooser, elastic={}) as turns:
        n_answers = 2 + len(check_interruptions(turns))
    assert len(chooser.asked) == n_answers


def test_an_answer_may_go_on_at_another_level(reference_model, tmp_path):
    model = prepare(reference_model, tmp_path / "model.gguf", tables=("uniform",))
    chooser = Chooser("at_resume")
    with opened(model, tmp_path, extra=chooser, elastic={}) as turns:
        plugin = active_suite().plugin("elastic")
        turns.answer()
        n_parts = len(turns.left) - turns.left.count(0)
        before = plugin.llmaas_status()["tokens"]
        turns.answer([1, n_parts + 2])
        after = plugin.llmaas_status()["tokens"]
        n_further = turns.left.count(0)
    assert chooser.asked == (3,)  # not while the prompt is evaluated
    assert "0.5" not in before
    assert after["0.5"] == n_further - 2


@pytest.mark.parametrize("on_error", ["log", "raise"])
def test_an_answer_whose_level_cannot_be_chosen_again(reference_model, tmp_path, on_error):
    """It goes on at its level, or the app gets the error; the next one has the engine."""

    class Failing(Chooser):
        def choose(self, about):
            raise ValueError("no level")

    model = prepare(reference_model, tmp_path / "model.gguf", tables=("uniform",))
    chooser, n_parts = Failing("at_resume"), -(-len(PROMPT) // N_PIECE)
    with opened(model, tmp_path, extra=chooser, on_error=on_error, elastic={}) as turns:
        expected = turns.answer()
        if on_error == "log":
            assert turns.answer([n_parts + 2]) == expected
            assert "no level" in str(active_suite().status()["errors"]["elastic"])
        else:
            with pytest.raises(PluginError, match="llmaas_request_resume"):
                turns.answer([n_parts + 2])
        assert turns.answer() == expected


def test_a_fork_while_a_request_is_away_changes_nothing(reference_model, tmp_path):
    class Forking(Turns):
        codes = ()

        def ask_other(self):
            super().ask_other()
            self.codes += (in_child(lambda: active_suite().deactivate()),)

    with opened(reference_model, tmp_path, turns=Forking()) as turns:
        expected = turns.answer()
        assert turns.answer([2, 8]) == expected
        assert turns.codes == (0, 0)


def test_requests_with_an_apps_own_state_keep_the_engine(reference_model, tmp_path):
    """Logits of the whole prompt, and an app's own draft model, would be another request's."""
    with opened(reference_model, tmp_path) as turns:
        turns.llama.draft_model = lambda tokens: tokens[:0]
        turns.answer([0])
        assert not turns.left
        turns.llama.draft_model = None
        turns.answer([0], stopping_criteria=StoppingCriteriaList([lambda *_: False]))
        assert turns.left


def test_only_requests_whose_cells_are_kept_are_interrupted(reference_model, tmp_path):
    with opened(reference_model, tmp_path) as turns:
        with without("kv_chunks"):
            turns.answer([0])
        assert not turns.left
        turns.answer([0])
        assert turns.left


def test_lost_cells_are_evaluated_at_their_levels(reference_model, tmp_path):
    """A store without room forgets them; the prompt's and the answer's levels differ."""

    class Forgetting(Turns):
        def ask_other(self):
            super().ask_other()
            self.llama._ctx.kv_cache_clear()
            active_suite().evict("long")

    model = prepare(reference_model, tmp_path / "model.gguf", tables=("uniform",))
    with (
        opened(model, tmp_path, turns=Forgetting(), elastic={}) as turns,
        elastic.level(prefill=0.4, decode=0.8),
    ):
        expected = turns.answer(temperature=0.0, context_id="long")
        assert turns.answer([8], temperature=0.0, context_id="long") == expected
        assert turns.answer([2], temperature=0.0, context_id="long") == expected


def test_an_interrupted_request_that_fails_ends(reference_model, tmp_path):
    class Gone(BaseException):
        """The caller left."""

    class Leaver(Turns):
        @hookimpl
        def llmaas_turn(self, request, n_left):
            n_most = super().llmaas_turn(request, n_left)
            if self.at and not self.is_other and len(self.left) > max(self.at):
                raise Gone
            return n_most

    with opened(reference_model, tmp_path) as turns:
        expected = turns.answer()
    with opened(reference_model, tmp_path, turns=Leaver()) as turns:
        for at in (0, 2, 7):
            with pytest.raises(Gone):
                turns.answer([at])
            assert turns.requests[0] == "other"
            assert len(turns.requests) == 2
            assert turns.answer() == expected


def test_an_interrupter_may_use_the_cells_without_a_request(reference_model, tmp_path):
    class Clearing(Turns):
        def ask_other(self):
            self.llama._ctx.kv_cache_clear()
            self.replies.append("")

    with opened(reference_model, tmp_path, turns=Clearing()) as turns:
        expected = turns.answer(temperature=0.0)
        assert turns.answer([2, 8], temperature=0.0) == expected
        assert len(turns.replies) == 2


def test_plugins_that_end_meanwhile(reference_model, tmp_path):
    """The request goes on without them."""

    class Ending(Turns):
        def ask_other(self):
            super().ask_other()
            self.suite.deactivate()

    with opened(reference_model, tmp_path) as turns:
        expected = turns.answer(temperature=0.0)
    for at in (1, 6):
        with opened(reference_model, tmp_path, turns=Ending()) as turns:
            turns.suite = active_suite()
            assert turns.answer([at], temperature=0.0) == expected


class Seated:
    """A request that goes aside after its first token, and comes back while another one runs."""

    def __init__(self):
        self.llama = self.seated = None
        self.is_aside, self.comes_back = threading.Event(), threading.Event()
        self.n_turns = 0

    @hookimpl(tryfirst=True)
    def llmaas_context_create(self, create):
        create.wants_seats = 1

    @hookimpl
    def llmaas_turn(self, request, n_left, seat):
        if n_left:
            return
        if request.app == "seated" and not self.is_aside.is_set():
            seat.leave()
            self.is_aside.set()
            assert self.comes_back.wait(60)
            seat.enter()
        elif request.app == "alone":
            self.n_turns += 1
            if self.n_turns == 5:
                self.comes_back.set()
                self.seated.join()

    def ask(self, app, prompt, n):
        with serving_context(None, app):
            tokens = self.llama.generate(prompt, temp=0.0)
            found = [next(tokens) for _ in range(n)]
            tokens.close()
        return found

    def both(self):
        """Return the answer of a request that the seated one interrupts."""
        self.seated = threading.Thread(target=self.ask, args=("seated", OTHER, 8))
        self.seated.start()
        assert self.is_aside.wait(60)
        return self.ask("alone", PROMPT, 12)


def test_a_request_is_saved_before_one_comes_back_from_its_seat(reference_model, tmp_path):
    """That one takes its cells without asking for its own, so none of them is evaluated again."""
    settings = {"parked_tokens": 1024, "codec": "int8"}
    with opened(reference_model, tmp_path, settings, turns=Seated()) as turns:
        sizes = []
        real = turns.llama.eval
        turns.llama.eval = lambda tokens: (sizes.append(len(tokens)), real(tokens))
        turns.both()
        assert sum(sizes) == len(OTHER) + 7 + len(PROMPT) + 11  # each token once, but the last ones

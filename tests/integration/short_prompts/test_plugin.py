"""short_prompts on the packaged model: requests read the words that matter most."""

from __future__ import annotations

import contextlib
import gc
import os

import numpy as np
import pytest
from claiming import add_adapter
from llama_cpp import Llama
from low_rank import matrices_of, random_terms, write_lora_of
from requested import Recorder, greedy

from llmaas_hooks import ConfigError, PluginError, hookimpl, request_scope, serving_context
from llmaas_plugins import activate, short_prompts
from llmaas_plugins.config import ServiceConfig
from llmaas_plugins.service import LLMService
from llmaas_plugins.short_prompts.scorers import SCORERS

STORY = (
    "the old keeper of the tower walks down to the water each morning and looks for the boats that "
    "come back from the sea with nets and fish while the wind is still low and the birds are quiet "
)
ASKED = "What does the keeper do?"
TEXT = f"{STORY * 2}\n\n{ASKED}"
TURN = f"Read this.\n{STORY * 3}\n\n{ASKED}"
"""A turn that is too long for a question; its first line and the last one are kept."""
ENGINE = {"n_ctx": 512, "verbose": False, "n_threads": 1, "n_threads_batch": 1}


@pytest.fixture
def start(reference_model):
    """Return a function that activates, and opens an engine."""
    with contextlib.ExitStack() as stack:

        def start(settings=None, **plugins):
            recorder = Recorder()
            config = {"short_prompts": {"least_tokens": 32, **(settings or {})}} | plugins
            suite = stack.enter_context(
                activate({"on_error": "raise", "plugins": config}, {"recorder": recorder})
            )
            llama = stack.enter_context(contextlib.closing(Llama(str(reference_model), **ENGINE)))
            return suite, llama, recorder

        yield start


def tokens_of(llama, text=TEXT):
    return llama.tokenize(text.encode(), special=True)


def status(suite):
    return suite.status()["plugins"]["short_prompts"]


def test_a_request_reads_what_a_request_with_the_shorter_prompt_reads(start, reference_model):
    suite, llama, recorder = start({"scorer": "first"})
    tokens = tokens_of(llama)
    with request_scope.noting() as notes, short_prompts.share(0.5):
        found = greedy(llama, tokens, 4)
    (request,) = recorder.requests
    read = request.tokens.tolist()
    assert request.whole.tokens.tolist() == tokens
    assert len(tokens) // 2 - 2 <= len(read) <= len(tokens) // 2
    assert llama.detokenize(read).decode().rstrip().endswith(ASKED)
    note = notes["short_prompts"]
    assert (note["share"], note["tokens"], note["tokens_read"]) == (0.5, len(tokens), len(read))
    assert note["left_out"].split()[-1] == STORY.rsplit(maxsplit=1)[-1]
    assert not note["over_budget"]
    last = {key: value for key, value in note.items() if key != "left_out"}
    assert status(suite)["last"] == {"": last}
    with contextlib.closing(Llama(str(reference_model), **ENGINE)) as vanilla:
        assert greedy(vanilla, read, 4) == found


@pytest.mark.parametrize("scorer", sorted(SCORERS))
def test_each_scorer_keeps_the_budget_and_leaves_no_trace(start, scorer):
    suite, llama, recorder = start({"scorer": scorer, "share": 0.6})
    tokens = tokens_of(llama)
    with short_prompts.share(1.0):
        greedy(llama, tokens, 3)
        expected = llama.n_tokens, np.array(llama.eval_logits)
        llama.reset()
    greedy(llama, tokens, 1)
    greedy(llama, tokens, 1)
    first, second = (one.tokens for one in recorder.requests[1:])
    assert first.tolist() == second.tolist()
    assert 0 <= 0.6 * len(tokens) - len(first) < 4
    llama.reset()
    with short_prompts.share(1.0):
        greedy(llama, tokens, 3)
    assert llama.n_tokens == expected[0]
    np.testing.assert_array_equal(np.array(llama.eval_logits), expected[1])
    assert status(suite)["prompts"] == 2


def test_who_decides_the_share(start):
    settings = {
        "share": 0.8,
        "scorer": "last",
        "apps": {"mail": {"share": 0.5}, "law": {"share": 1}},
    }
    _, llama, recorder = start(settings)
    tokens = tokens_of(llama)

    def share(app=None):
        with serving_context(None, app):
            greedy(llama, tokens, 1)
        return round(len(recorder.requests[-1].tokens) / len(tokens), 1)

    assert (share(), share("notes"), share("mail"), share("law")) == (0.8, 0.8, 0.5, 1.0)
    with short_prompts.share(0.6):
        assert (share("mail"), share("law")) == (0.6, 0.6)
        with short_prompts.share(1.0):
            assert share("mail") == 1.0
        with request_scope.without("short_prompts"):
            assert share("mail") == 1.0


def test_short_and_protected_prompts_stay_whole(start):
    suite, llama, recorder = start({"scorer": "first", "share": 0.5, "protect": ["[a-z]{1,40}"]})
    for text in ("Once upon a time", TEXT):
        tokens = tokens_of(llama, text)
        greedy(llama, tokens, 1)
        assert recorder.requests[-1].tokens.tolist() == tokens
    assert status(suite)["prompts"] == 0


def test_prompts_around_a_gap_stay_whole(start, reference_model):
    """An answer that fills a gap needs the words at the gap, wherever they are."""
    suite, llama, recorder = start({"scorer": "first", "share": 0.5})
    llama.create_completion(TEXT, suffix=f" {STORY}", max_tokens=1)
    assert recorder.requests[-1].whole is None
    llama.create_completion(TEXT, max_tokens=1)
    assert recorder.requests[-1].whole is not None
    mark = tokens_of(llama, " keeper")[-1]
    own = ENGINE | {"kv_overrides": {"tokenizer.ggml.fim_mid_token_id": mark}}
    with contextlib.closing(Llama(str(reference_model), **own)) as filling:
        for text, is_whole in ((TEXT, True), (TEXT.replace(" keeper", ""), False)):
            greedy(filling, tokens_of(filling, text), 1)
            assert (recorder.requests[-1].whole is None) == is_whole
            tokens = np.array(tokens_of(filling, text), np.int32)
            for found in suite.plugin("short_prompts").shortened(filling, tokens, [0.7, 0.5]):
                assert np.array_equal(found.tokens, tokens) == is_whole
                assert (found.n_left_out == 0) == is_whole
    assert status(suite)["prompts"] == 2


def test_protected_words_are_kept_beyond_the_share_and_that_is_said(start):
    suite, llama, _ = start({"scorer": "random", "share": 0.1})
    names = " ".join(f"call_{i}()" for i in range(1000, 1010))
    with request_scope.noting() as notes:
        greedy(llama, tokens_of(llama, f"{STORY}{names} {STORY}\n\n{ASKED}"), 1)
    note = notes["short_prompts"]
    assert note["over_budget"]
    assert "call" not in note["left_out"]
    assert status(suite)["over_budget"] == 1


def test_a_pattern_that_may_take_for_ever_is_refused(reference_model):
    settings = {"protect": ["(a+)+b"]}
    with (
        pytest.raises(ConfigError, match=r"protect.*repeated"),
        activate({"plugins": {"short_prompts": settings}}),
    ):
        pass


def test_planners_are_offered_shares_that_fit(start):
    costs = []

    class Planner:
        @hookimpl
        def llmaas_level(self, request, cost):
            costs.append(cost().shorter)

    suite, llama, recorder = start({"scorer": "first", "shares": [0.3, 0.6, 0.05]})
    suite.hooks.register("planner", Planner())
    tokens = tokens_of(llama)
    greedy(llama, tokens, 1)
    assert [one.share for one in costs[0]] == [0.6, 0.3, 0.05]
    sizes = [one.n_tokens for one in costs[0]]
    assert sizes == sorted(sizes, reverse=True)
    for one in costs[0]:
        with short_prompts.share(one.share):
            greedy(llama, tokens, 1)
        assert 0 <= one.n_tokens - len(recorder.requests[-1].tokens) < 4
    assert costs[1:] == [(one,) for one in costs[0]]  # the app has chosen
    with short_prompts.share(1):
        greedy(llama, tokens, 1)
    assert costs[-1] == ()


def test_cells_are_named_by_what_was_evaluated(start, tmp_path):
    _, llama, recorder = start({"scorer": "first"}, kv_chunks={"store": str(tmp_path / "kv")})
    tokens = tokens_of(llama)
    with short_prompts.share(0.5):
        expected = greedy(llama, tokens, 3)
        greedy(llama, tokens_of(llama, "Something else. " * 20), 2)
        again = greedy(llama, tokens, 3)
    assert again == expected
    assert recorder.stats[-1].n_reused > len(tokens) // 4
    whole = greedy(llama, tokens, 3)
    assert recorder.requests[-1].tokens.tolist() == tokens
    llama.reset()
    assert greedy(llama, tokens, 3) == whole


def test_a_shortened_call_leaves_a_context_s_whole_prompt_stored(start, tmp_path):
    suite, llama, _ = start({"scorer": "last"}, kv_chunks={"store": str(tmp_path / "kv")})
    plugin, tokens = suite.plugin("kv_chunks"), tokens_of(llama)

    def n_stored():
        suite.settle()
        stored = plugin._store.stored("chat")
        return 0 if stored is None else len(stored.tokens)

    with serving_context("chat"):
        greedy(llama, tokens, 2)
        assert n_stored() == len(tokens) + 1
        with short_prompts.share(0.4):
            greedy(llama, tokens, 2)
        assert n_stored() == len(tokens) + 1
    assert suite.evict("chat") > 0
    assert plugin.llmaas_status()["chunks"] == 0


def test_a_child_shortens_too(start):
    _, llama, recorder = start({"scorer": "self_information", "share": 0.5})
    tokens = tokens_of(llama)
    greedy(llama, tokens, 1)
    expected = len(recorder.requests[-1].tokens)
    pid = os.fork()
    if pid == 0:
        try:
            greedy(llama, tokens, 1)
            code = 0 if len(recorder.requests[-1].tokens) == expected else 2
        except BaseException:
            code = 1
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_nothing_is_kept_of_closed_engines(start):
    suite, llama, recorder = start({"scorer": "attention", "share": 0.5})
    greedy(llama, tokens_of(llama), 1)
    plugin = suite.plugin("short_prompts")
    llama.close()
    recorder.requests.clear()
    gc.collect()
    assert not plugin._natives
    assert not len(plugin._prompts)


def test_the_service_takes_a_share_and_says_what_was_left_out(reference_model, tmp_path):
    config = {"plugins": {"short_prompts": {"least_tokens": 32, "scorer": "first"}}}
    with (
        activate(config),
        LLMService.open(reference_model, ServiceConfig(state_dir=tmp_path), **ENGINE) as service,
    ):
        context = service.bind("notes").new_context()
        reply = context.call(TURN, prompt_share=0.5, max_tokens=4)
        assert reply.notes["short_prompts"]["share"] == 0.5
        assert "short_prompts" not in context.call(ASKED, prompt_share=1, max_tokens=4).notes
        with pytest.raises(ConfigError, match="above 0 and at most 1"):
            context.call(ASKED, prompt_share=0)
    with LLMService.open(reference_model, ServiceConfig(state_dir=tmp_path), **ENGINE) as service:
        context = service.bind("notes").new_context()
        with pytest.raises(ConfigError, match="short_prompts is not on"):
            context.call(ASKED, prompt_share=0.5)


def test_a_context_does_not_outgrow_its_window_unseen(reference_model, tmp_path):
    """The tokens of a context are those of its whole history, also if a part was read."""
    config = {"plugins": {"short_prompts": {"least_tokens": 32, "scorer": "first", "share": 0.5}}}
    settings = ServiceConfig(state_dir=tmp_path, at_limit="slide", max_new_tokens=16)
    with (
        activate(config),
        LLMService.open(reference_model, settings, **ENGINE) as service,
    ):
        context = service.bind("notes").new_context()
        replies = [context.call(f"{STORY}\n\n{ASKED}", max_tokens=8) for _ in range(8)]
        assert any(reply.n_left_out for reply in replies)
        assert all("short_prompts" in reply.notes for reply in replies[1:])
        assert max(reply.n_tokens for reply in replies) <= ENGINE["n_ctx"]


def test_a_request_that_ends_while_words_are_judged_leaves_the_engine_usable(start):
    class Over(BaseException):
        """End of a request, as of one whose client has left."""

    def check():
        raise Over

    suite, llama, recorder = start({"scorer": "attention", "share": 0.5})
    tokens = tokens_of(llama)
    with request_scope.checked_by(check), pytest.raises(Over):
        greedy(llama, tokens, 1)
    assert status(suite)["prompts"] == 0
    assert llama not in suite.plugin("short_prompts")._failing
    greedy(llama, tokens, 1)
    assert status(suite)["prompts"] == 1
    assert recorder.requests[-1].whole.tokens.tolist() == tokens


def test_a_scorer_says_which_adapter_it_did_not_see(start, reference_model, tmp_path):
    terms = random_terms(reference_model, r"blk\.0\.ffn_up\.weight")
    lora = write_lora_of(matrices_of(terms, reference_model), tmp_path / "lora.gguf")
    costs = []

    class Planner:
        @hookimpl
        def llmaas_level(self, cost):
            costs.append(cost().shorter_by)

    suite, llama, _ = start({"scorer": "attention", "share": 0.5})
    suite.hooks.register("planner", Planner())

    def scorer():
        with request_scope.noting() as notes:
            greedy(llama, tokens_of(llama), 1)
        return notes["short_prompts"]["scorer"], costs[-1]

    assert scorer() == ("attention",) * 2
    add_adapter(llama.model, llama.ctx, lora)
    assert scorer() == ("attention without llama_set_adapters_lora",) * 2


def test_a_scorer_that_fails_is_no_longer_offered_to_planners(start, monkeypatch, caplog):
    costs = []

    class Planner:
        @hookimpl
        def llmaas_level(self, cost):
            costs.append(cost().shorter)

    suite, llama, _ = start({"scorer": "attention", "share": 0.5})
    suite.hooks.register("planner", Planner())
    tokens = tokens_of(llama)
    scorer = suite.plugin("short_prompts")._scorers.scorer_for(llama)
    with monkeypatch.context() as patch:
        patch.setattr(type(scorer), "scores", lambda *_: 1 / 0)
        with pytest.raises(PluginError):
            greedy(llama, tokens, 1)
        with short_prompts.share(1.0):
            greedy(llama, tokens, 1)
    assert [one.seconds for one in costs[0]] == [None] * 4  # it was never timed
    greedy(llama, tokens, 1)
    greedy(llama, tokens, 1)
    assert [len(found) for found in costs] == [4, 0, 0, 4]
    assert costs[-1][0].seconds > 0

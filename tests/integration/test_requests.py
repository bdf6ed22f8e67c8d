"""The request hooks on the packaged model: when they fire, their arguments, their side effects."""

from __future__ import annotations

import contextlib
import inspect
import itertools
from concurrent.futures import ThreadPoolExecutor

import llama_cpp
import numpy as np
import pytest
from llama_cpp import LogitsProcessorList, StoppingCriteriaList
from requested import ONCE, PROMPT, Recorder, greedy

from llmaas_hooks import Levels, RequestStats, hookimpl
from llmaas_hooks.request_scope import at_levels, serving_context, without


def test_hook_llmaas_request_begin(recorder, make_llama):
    llama = make_llama()
    generator = llama.generate(PROMPT, temp=0.0)
    assert inspect.isgenerator(generator)
    assert recorder.events == []  # an unused generator does nothing, as in vanilla
    next(generator)
    (request,) = recorder.requests
    assert recorder.events == ["begin", "restore"]
    assert request.tokens.tolist() == PROMPT
    assert request.tokens.dtype == np.int32
    assert request.context_id is None
    assert request.engine.llama is llama
    assert (request.engine.ctx, request.engine.model) == (llama.ctx, llama.model)
    generator.close()


def test_a_request_belongs_to_the_blocks_it_was_made_in(recorder, make_llama):
    llama = make_llama()
    levels = Levels(0.4, 0.8)
    with serving_context("context", "mail"), without("elastic"), at_levels(levels):
        generator = llama.generate(PROMPT, temp=0.0)
    with serving_context("other", "notes"), ThreadPoolExecutor(1) as pool:
        pool.submit(next, generator).result()
        next(generator)
    generator.close()
    (request,) = recorder.requests
    assert (request.context_id, request.app) == ("context", "mail")
    assert (request.declined, request.levels) == ({"elastic"}, levels)


def test_cells_belong_to_the_app_of_the_block(recorder, make_llama):
    """``Llama.generate`` empties its records when it starts, maybe outside of the block."""
    llama = make_llama()
    with serving_context(None, "mail"):
        generator = llama.generate(PROMPT, temp=0.0)
    next(generator)
    (request,) = recorder.requests
    assert request.engine.resident_app == "mail"
    generator.close()


def test_a_request_says_whether_the_app_reads_its_tokens(recorder, make_llama):
    llama = make_llama()
    reads = LogitsProcessorList([lambda _tokens, scores: scores])
    stops = StoppingCriteriaList([lambda _tokens, _scores: False])
    for given in ({}, {"logits_processor": reads}, {"stopping_criteria": stops}):
        llama("Once", max_tokens=2, **given)
    llama("Once", max_tokens=2, logit_bias={"300": 1.0})  # both requests are llama-cpp-python's
    llama.create_chat_completion([{"role": "user", "content": "Hello"}], max_tokens=2)
    found = [request.reads_tokens for request in recorder.requests]
    assert found == [False, True, True, False, False]


def test_hook_llmaas_level_is_told_to_those_who_begin(patched, make_llama):
    class Chooser:
        n = 0

        @hookimpl
        def llmaas_level(self, request):
            self.n += 1
            return Levels(prefill=0.5) if len(request.tokens) > 3 else None

    class Told:
        found = ()

        @hookimpl
        def llmaas_request_begin(self, levels):
            self.found += (chooser.n, levels)

    chooser, told = Chooser(), Told()
    patched(chooser=chooser, told=told)
    llama = make_llama()
    for prompt in (PROMPT, [1, 400]):
        greedy(llama, prompt, 2)
    assert told.found == (1, Levels(prefill=0.5), 2, None)


class Cutter:
    """Reads the first and the last tokens of prompts, and records what it is asked."""

    def __init__(self, n_each=2, level=None):
        self.n_each, self.level, self.asked = n_each, level, []

    @hookimpl
    def llmaas_level(self):
        return self.level

    @hookimpl
    def llmaas_shorten(self, request, share):
        self.asked.append((request.tokens.tolist(), share))
        tokens, n = request.tokens, self.n_each
        return np.concatenate([tokens[:n], tokens[-n:]])


SHORT = [*PROMPT[:2], *PROMPT[-2:]]


def test_hook_llmaas_shorten(patched, make_llama):
    expected = greedy(make_llama(), SHORT, 4)
    cutter, recorder = Cutter(), Recorder()
    patched(cutter=cutter, recorder=recorder)
    llama = make_llama()
    given = list(PROMPT)
    found = greedy(llama, given, 4)
    assert cutter.asked == [(PROMPT, None)]
    assert given == PROMPT  # the app's list is its own
    assert recorder.events == ONCE
    (request,) = recorder.requests
    assert (request.tokens.tolist(), request.whole.tokens.tolist()) == (SHORT, PROMPT)
    assert request.whole.whole is None
    assert recorder.saved.tolist() == SHORT + found[:3]
    assert recorder.stats[0].n_prompt == len(SHORT)
    assert found == expected


def test_drafts_follow_the_prompt_that_is_read(patched, make_llama):
    class Offering:
        @hookimpl
        def llmaas_draft(self, request):
            self.asked = request.tokens.tolist()

    offering = Offering()
    patched(cutter=Cutter(), offering=offering)
    greedy(make_llama(), PROMPT, 1)
    assert offering.asked == SHORT


def test_a_share_of_the_prompt_is_the_app_s_or_else_the_planner_s(patched, make_llama):
    planned = Levels(prompt_share=0.5)
    cutter = Cutter(level=planned)
    patched(cutter=cutter)
    llama = make_llama()
    greedy(llama, PROMPT, 1)
    for share in (0.7, 1.0):
        with at_levels(Levels(prompt_share=share)):
            greedy(llama, PROMPT, 1)
    assert [share for _, share in cutter.asked] == [0.5, 0.7]  # a whole prompt needs no plugin


@pytest.mark.parametrize("reader", ["processor", "criterion", "all logits", "no reset", "full"])
def test_a_prompt_stays_whole_if_the_app_counts_on_its_tokens(patched, make_llama, reader):
    cutter = Cutter()
    patched(cutter=cutter)
    llama = make_llama(logits_all=reader == "all logits")
    given = {
        "processor": {"logits_processor": LogitsProcessorList([lambda _tokens, scores: scores])},
        "criterion": {"stopping_criteria": StoppingCriteriaList([lambda _tokens, _: False])},
        "no reset": {"reset": False},
    }.get(reader, {})
    if reader == "full":
        with pytest.raises(ValueError, match="exceed context window"):
            llama.create_completion(PROMPT * llama.n_ctx(), max_tokens=1)
    else:
        greedy(llama, PROMPT, 2, **given)
        assert llama.n_tokens > len(PROMPT)
    assert cutter.asked == []


@pytest.mark.parametrize("wrong", [PROMPT, np.array(PROMPT[:3]), np.array([], np.int32), "some"])
def test_a_wrong_prompt_is_not_read(patched, make_llama, wrong, caplog):
    class Wrong:
        @hookimpl
        def llmaas_shorten(self):
            return wrong

    recorder = Recorder()
    patched(on_error="log", wrong=Wrong(), recorder=recorder)
    greedy(make_llama(), PROMPT, 2)
    assert recorder.requests[0].tokens.tolist() == PROMPT
    assert "'wrong' failed in llmaas_shorten" in caplog.text


def test_a_completion_counts_the_whole_prompt(patched, make_llama):
    patched(cutter=Cutter())
    llama = make_llama()
    found = llama.create_completion(PROMPT, max_tokens=3, temperature=0.0)
    assert found["usage"]["prompt_tokens"] == len(PROMPT)
    assert llama.n_tokens == len(SHORT) + found["usage"]["completion_tokens"] - 1


def test_hook_llmaas_request_end(recorder, make_llama):
    llama = make_llama()
    first = greedy(llama, PROMPT, 4)
    assert recorder.events == ONCE
    greedy(llama, PROMPT + first, 3)
    assert recorder.events == ONCE * 2
    cold, warm = recorder.stats
    assert (cold.n_prompt, cold.n_reused, cold.n_generated) == (6, 0, 4)
    assert (warm.n_prompt, warm.n_reused, warm.n_generated) == (10, 9, 3)
    assert 0 < cold.prepare_s < cold.first_token_s < cold.total_s
    assert recorder.requests[0].engine is recorder.requests[1].engine


def test_hook_llmaas_kv_save(recorder, make_llama):
    llama = make_llama()
    found = greedy(llama, PROMPT, 4)
    assert recorder.saved.tolist() == PROMPT + found[:-1]  # the last token was never evaluated
    assert recorder.saved.dtype == np.int32
    before = recorder.saved.copy()
    greedy(llama, [1, 7, 8], 2)
    assert before.tolist() == PROMPT + found[:-1]  # a copy, not Llama's own buffer


def test_one_request_per_completion(recorder, make_llama):
    reply = make_llama().create_completion("Once upon a time", max_tokens=5, temperature=0.0)
    assert recorder.events == ONCE
    assert recorder.stats[0].n_prompt == reply["usage"]["prompt_tokens"]
    assert recorder.stats[0].n_generated >= reply["usage"]["completion_tokens"]


def test_chat_is_a_request_too(recorder, make_llama):
    messages = [{"role": "user", "content": "Hello"}]
    make_llama(chat_format="chatml").create_chat_completion(messages, max_tokens=3)
    assert recorder.events == ONCE


def test_reset_false_restores_nothing(recorder, make_llama):
    llama = make_llama()
    greedy(llama, PROMPT, 1)
    greedy(llama, PROMPT[:2], 1, reset=False)
    assert recorder.events == [*ONCE, "begin", "save", "end"]
    assert recorder.stats[-1].n_reused == 0  # appended to the cells, not found in them


def test_a_prompt_may_be_read_once_only(recorder, make_llama):
    llama = make_llama()
    expected = list(itertools.islice(llama.generate(PROMPT, temp=0.0), 3))
    assert list(itertools.islice(llama.generate(iter(PROMPT), temp=0.0), 3)) == expected
    assert recorder.stats[-1].n_prompt == len(PROMPT)


def test_a_wrong_argument_begins_no_request(recorder, make_llama):
    with pytest.raises(TypeError, match="temprature"):
        next(make_llama().generate(PROMPT, temprature=0.0))
    assert recorder.events == []


def test_serving_context_names_the_request(recorder, make_llama):
    llama = make_llama()
    with serving_context("chat-1", app="mail"):
        greedy(llama, PROMPT, 1)
    with serving_context(None, app="notes"):
        greedy(llama, PROMPT, 1)
    greedy(llama, PROMPT, 1)
    found = [(request.context_id, request.app) for request in recorder.requests]
    assert found == [("chat-1", "mail"), (None, "notes"), (None, None)]


def decode_own_batch(llama):
    tokens = (llama_cpp.llama_token * 2)(400, 401)  # the batch holds their address only
    batch = llama_cpp.llama_batch_get_one(tokens, 2)
    assert llama_cpp.llama_decode(llama.ctx, batch) == 0


def edit_cells(name, *args):
    return lambda llama: getattr(llama_cpp, name)(llama_cpp.llama_get_memory(llama.ctx), 0, *args)


@pytest.mark.parametrize(
    "disturb",
    [
        decode_own_batch,
        edit_cells("llama_memory_seq_rm", 2, 3),
        edit_cells("llama_memory_seq_rm", 2, llama_cpp.llama_pos(3)),
        edit_cells("llama_memory_seq_add", 4, -1, 1),
        edit_cells("llama_memory_seq_div", 4, -1, 2),
    ],
    ids=["batch", "hole", "typed hole", "shift", "division"],
)
def test_cells_that_an_app_changed_are_not_kept(recorder, make_llama, caplog, disturb):
    llama = make_llama()
    generator = llama.generate(PROMPT, temp=0.0)
    next(generator)
    disturb(llama)
    generator.close()
    # a batch of the app's own ends the request before it changes cells
    saves = ["save"] if disturb is decode_own_batch else []
    assert recorder.events == ["begin", "restore", *saves, "end"]
    recorder.events.clear()
    llama.reset()
    greedy(llama, PROMPT, 1)  # Llama starts from nothing
    assert recorder.events == ONCE
    recorder.events.clear()
    disturb(llama)
    generator = llama.generate([*PROMPT, 405], temp=0.0)
    with contextlib.suppress(RuntimeError):  # llama.cpp may detect it
        next(generator)
    generator.close()
    assert recorder.events == ["begin", "end"]
    assert "without Llama's knowledge" in caplog.text
    recorder.events.clear()
    greedy(llama, [7, 8, 9], 1)
    assert recorder.events == ONCE


def test_ends_that_an_app_cuts_off_are_not_missed(recorder, make_llama):
    llama = make_llama()
    greedy(llama, PROMPT, 1)
    edit_cells("llama_memory_seq_rm", 4, -1)(llama)
    llama.n_tokens = 4
    greedy(llama, PROMPT, 1)
    assert recorder.events == ONCE * 2


def send_script(llama):
    generator = llama.generate(PROMPT, temp=0.0)
    found = [next(generator), generator.send([410, 411]), next(generator), generator.send(None)]
    generator.close()
    return found, llama._input_ids.tolist()


def test_send_protocol_is_kept(patched, make_llama):
    vanilla = send_script(make_llama(logits_all=True))
    recorder = Recorder()
    patched(recorder=recorder)
    assert send_script(make_llama(logits_all=True)) == vanilla
    assert recorder.stats[0].n_generated == 4


def test_stats_are_frozen():
    with pytest.raises(AttributeError):
        RequestStats(1, 0, 0, 0.0, None, 0.0).n_prompt = 2

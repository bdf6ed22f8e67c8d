"""elastic: who decides the level at which each batch is computed."""

from __future__ import annotations

import contextlib
import itertools
import threading

import numpy as np
import pytest
from interrupting import Interruption
from leveled import TENTHS, N, Recorder, answered, report
from llama_cpp import llama_cpp
from own_batches import has_process, process
from switching import PROMPT, ask

from llmaas_hooks import Levels, PluginError, hookimpl
from llmaas_plugins import elastic, without
from llmaas_plugins.elastic import contexts


def test_prompt_and_answer_have_levels_of_their_own(narrowing, engine):
    recorder = Recorder()
    suite = narrowing(recorder)
    llama = engine()
    with elastic.level(prefill=0.4, decode=0.8):
        answered(llama)
    assert recorder.taken(llama) == [(0.4, N), (0.8, 1), (0.8, 1)]
    answered(llama)
    assert recorder.taken(llama) == [(1.0, N), (1.0, 1), (1.0, 1)]
    found = report(suite)
    assert found["tokens"] == {"0.4": N, "0.8": 2, "1.0": N + 2}
    assert found["switches"] == 3  # into the block's levels and back
    assert [(one["level"], one["serves_request"]) for one in found["contexts"]] == [(1.0, False)]


@pytest.mark.parametrize(
    ("configured", "chosen", "asked", "expected"),
    [
        ({"level": 0.7}, None, {}, (0.7, 0.7)),
        ({"level": 0.7, "decode_level": 0.9}, None, {}, (0.7, 0.9)),
        ({"level": 0.7}, Levels(decode=0.5), {}, (0.7, 0.5)),
        ({"prefill_level": 0.3}, Levels(0.5, 0.5), {"decode": 0.2}, (0.5, 0.2)),
        ({"level": 0.7}, Levels(0.5, 0.5), {"level": 0.99, "prefill": 0.65}, (0.6, 0.9)),
    ],
)
def test_the_app_goes_before_plugins_and_these_before_the_configuration(  # noqa: PLR0917  a table
    narrowing, engine, configured, chosen, asked, expected
):
    recorder = Recorder(chosen)
    narrowing(recorder, **configured)
    llama = engine()
    with elastic.level(**asked) if asked else contextlib.nullcontext():
        answered(llama, 2)
    prefill, decode = expected
    assert recorder.taken(llama) == [(prefill, N), (decode, 1)]


def test_a_request_that_does_without_has_the_whole_model(narrowing, engine):
    recorder = Recorder(Levels(decode=0.5))
    narrowing(recorder, level=0.7)
    llama = engine()
    with elastic.level(0.4), without("elastic"):
        answered(llama, 2)
    assert recorder.taken(llama) == [(1.0, N), (1.0, 1)]
    answered(llama, 2)
    assert recorder.taken(llama) == [(0.7, N), (0.5, 1)]


def test_a_request_keeps_the_levels_that_it_began_with(narrowing, engine):
    recorder = Recorder()
    narrowing(recorder)
    llama, other = engine(), engine()
    with elastic.level(0.5):
        stream = llama.generate(PROMPT, temp=0.0)
        next(stream)
        with elastic.level(0.3):
            next(stream)
            answered(other, 1)
    answered(other, 1)
    next(stream)
    stream.close()
    assert recorder.taken(llama) == [(0.5, N), (0.5, 1), (0.5, 1)]
    assert recorder.taken(other) == [(0.3, N), (1.0, N)]
    assert {context.level for context in recorder.contexts.values()} == {0}


def test_a_prompt_that_is_asked_again_at_another_level_is_not_answered_from_memory(
    narrowing, engine
):
    narrowing()
    llama = engine()
    expected = {}
    for share in (1.0, 0.5):
        llama.reset()
        with elastic.level(share):
            expected[share] = ask(llama, PROMPT, 1)[1][0]
    # all cells but the last token's come from level 0.5; the logits must not
    whole = ask(llama, PROMPT, 1)[1][0]
    gap = np.abs(whole - expected[0.5]).max()
    assert gap > 0.1 * np.abs(expected[1.0] - expected[0.5]).max()


def test_a_stream_belongs_to_the_block_that_it_was_made_in(narrowing, engine):
    suite = narrowing(level=0.8)
    llama = engine()
    with elastic.level(0.5):
        stream = llama("once upon a time", max_tokens=3, stream=True)
    list(stream)
    assert list(report(suite)["tokens"]) == ["0.5"]
    assert report(suite)["contexts"][0]["level"] == 0.8


def test_a_request_that_cannot_begin_is_over(narrowing, engine):
    recorder = Unready()
    suite = narrowing(recorder, level=0.8)
    llama = engine()
    with elastic.level(0.5), pytest.raises(PluginError, match="not ready"):
        answered(llama)
    (found,) = report(suite)["contexts"]
    assert (found["level"], found["serves_request"]) == (0.8, False)


class Unready:
    @hookimpl(trylast=True)
    def llmaas_kv_restore(self):
        raise RuntimeError("not ready")


def test_threads_ask_for_themselves(narrowing, engine):
    recorder = Recorder()
    narrowing(recorder)
    llamas, barrier = [engine(), engine()], threading.Barrier(2)

    def serve(llama, level):
        with elastic.level(level):
            for _ in range(3):
                barrier.wait(timeout=60)
                answered(llama, 2)

    threads = [
        threading.Thread(target=serve, args=pair) for pair in zip(llamas, (0.4, 0.8), strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    narrow, wide = map(recorder.taken, llamas)
    assert (narrow, wide) == ([(0.4, N), (0.4, 1)] * 3, [(0.8, N), (0.8, 1)] * 3)


def test_batches_of_the_apps_own_are_at_the_level_of_the_block(narrowing, engine):
    """A sampled token has the prompt's level before it and the answer's level after it."""
    recorder = Recorder()
    narrowing(recorder, level=0.9)
    llama = engine()

    def shares():
        go_on(llama)
        return [share for share, _ in recorder.taken(llama)]

    assert shares() == [0.9, 0.9]
    with elastic.level(0.5):
        late = engine()
        with elastic.level(prefill=0.3):
            assert shares() == [0.3, 0.5]
        late.eval(PROMPT[:5])
        assert recorder.taken(late) == [(0.5, 5)]
        late.close()
    assert shares() == [0.9, 0.9]


def go_on(llama):
    """Evaluate tokens and sample one, as an app does without requests."""
    llama.eval(PROMPT[:5])
    llama.sample(temp=0.0)
    llama.eval(PROMPT[5:6])


@pytest.mark.parametrize("uses", [answered, go_on], ids=["request", "batch"])
@pytest.mark.slow
def test_a_switch_that_is_cut_off_is_made_up_for(narrowing, engine, uses):
    """The engine's level and its record may differ after Ctrl-C, wherever it comes."""
    recorder = Recorder()
    suite = narrowing(recorder)
    llama = engine()
    for n in itertools.count(1):
        with elastic.level(0.5), Interruption(n, contexts) as interruption:
            llama.reset()
            uses(llama)
        recorder.taken(llama)
        if not interruption.came:
            break
        llama.reset()
        uses(llama)
        assert {share for share, _ in recorder.taken(llama)} == {1.0}, interruption.where
        assert report(suite)["contexts"][0]["level"] == 1.0
    assert n > 10


def test_the_level_of_a_block_is_set_after_a_request_that_was_cut_off(narrowing, engine):
    """The app's own batches before and after the request are of the same block."""
    recorder = Recorder()
    narrowing(recorder)
    llama = engine()
    for n in itertools.count(1):
        with elastic.level(0.8):
            go_on(llama)
            with Interruption(n, contexts) as interruption, elastic.level(0.5):
                answered(llama)
            recorder.taken(llama)
            go_on(llama)
            assert {share for share, _ in recorder.taken(llama)} == {0.8}, interruption.where
        if not interruption.came:
            break
    assert n > 10


def test_an_apps_own_batch_ends_a_request_that_waits(narrowing, engine):
    recorder = Recorder()
    narrowing(recorder)
    llama = engine()
    with elastic.level(0.5):
        stream = llama.generate(PROMPT, temp=0.0)
        next(stream)
    llama.reset()
    llama.eval(PROMPT)
    assert recorder.taken(llama) == [(0.5, N), (1.0, N)]


@has_process
def test_batches_of_the_next_kind_are_at_the_level_of_the_block(narrowing, engine):
    recorder = Recorder()
    narrowing(recorder)
    llama = engine()
    context = recorder.contexts[int(llama.ctx)]
    with elastic.level(0.5):
        assert process(llama, PROMPT) == 0
    assert TENTHS[context.level] == 0.5
    llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(llama.ctx), True)
    assert process(llama, PROMPT) == 0
    assert TENTHS[context.level] == 1.0


def test_a_model_is_not_taken_for_another_one_at_the_same_path(  # noqa: PLR0917  its fixtures
    narrowing, engine, model, reference_model, tmp_path, monkeypatch
):
    """A relative path names another file in another folder."""
    for name, path in (("one", model), ("two", reference_model)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.gguf").symlink_to(path)
    suite = narrowing(level=0.4)
    monkeypatch.chdir(tmp_path / "one")
    llama = engine("model.gguf")
    monkeypatch.chdir(tmp_path / "two")
    engine("model.gguf")
    params = llama_cpp.llama_context_default_params()
    ctx = llama_cpp.llama_init_from_model(llama.model, params)
    assert [one["level"] for one in report(suite)["contexts"]] == [0.4, 0.4]
    llama_cpp.llama_free(ctx)


def test_the_first_tokens_logits_may_choose_the_answers_level(narrowing, engine):
    seen = []

    def choose(logits):
        seen.append(int(logits.argmax()))
        return 0.3

    recorder = Recorder(Levels(0.5, 0.8, at_first_token=choose))
    narrowing(recorder)
    llama = engine()
    tokens, _ = ask(llama, PROMPT, 3)
    assert recorder.taken(llama) == [(0.5, N), (0.3, 1), (0.3, 1)]
    assert seen == tokens[:1]
    with elastic.level(decode=0.9):  # the app's own level is not replaced
        ask(llama, [*PROMPT[:-1], 7], 2)
    assert recorder.taken(llama)[-1] == (0.9, 1)
    assert len(seen) == 1


@pytest.mark.parametrize("on_error", ["log", "raise"])
def test_a_failed_choice_leaves_the_answer_at_its_planned_level(narrowing, engine, on_error):
    recorder = Recorder(Levels(0.5, 0.8, at_first_token=lambda _logits: 1 / 0))
    suite = narrowing(recorder, on_error=on_error)
    llama = engine()
    if on_error == "raise":
        with pytest.raises(PluginError, match="division by zero"):
            ask(llama, PROMPT, 3)
        return
    ask(llama, PROMPT, 3)
    assert recorder.taken(llama) == [(0.5, N), (0.8, 1), (0.8, 1)]
    assert suite.status()["errors"]["elastic"]["llmaas_logits"]["count"] == 1


def test_equal_levels_have_equal_keys(narrowing, engine):
    """Both tables have the same widths; only the searched one has biases."""
    keys = []
    for settings in ({}, {"table": "searched"}, {"table": "searched", "compensate": False}):
        suite = narrowing(Recorder(), **settings)
        engine()
        keys += [one["key"] for one in report(suite)["models"].values()]
    assert keys[0] == keys[2] != keys[1]

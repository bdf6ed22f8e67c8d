"""Requests that end early, late, or never: by errors, by the app, or by another thread."""

from __future__ import annotations

import gc
import threading
import time

import llama_cpp
import pytest
from llama_cpp import LogitsProcessorList
from requested import ONCE, PROMPT, Recorder, greedy
from served import wait_until

from llmaas_hooks import PluginError, hookimpl


@pytest.mark.parametrize("how", ["close", "del", "break"])
def test_generator_closed_early(recorder, make_llama, how):
    generator = make_llama().generate(PROMPT, temp=0.0)
    next(generator)
    if how == "close":
        generator.close()
    elif how == "break":
        for _ in generator:
            break
    del generator
    gc.collect()
    assert recorder.events == ONCE
    assert recorder.stats[0].n_generated == (2 if how == "break" else 1)
    assert recorder.stats[0].pending_s == 0


def test_exception_inside(recorder, make_llama):
    def explode(ids, logits):
        raise ZeroDivisionError

    llama = make_llama()
    stop = llama_cpp.StoppingCriteriaList([explode])
    with pytest.raises(ZeroDivisionError):
        next(llama.generate(PROMPT, stopping_criteria=stop))
    assert recorder.events == ONCE
    assert recorder.saved.tolist() == PROMPT
    assert recorder.stats[0].first_token_s is None
    greedy(llama, PROMPT, 1)
    assert recorder.events == ONCE * 2


def test_the_wait_for_a_token_that_does_not_come_is_measured(recorder, make_llama):
    def stall(ids, logits):
        if len(ids) == len(PROMPT) + 2:
            time.sleep(0.05)
            raise TimeoutError
        return False

    stop = llama_cpp.StoppingCriteriaList([stall])
    with pytest.raises(TimeoutError):
        list(make_llama().generate(PROMPT, stopping_criteria=stop))
    stats = recorder.stats[0]
    assert stats.n_generated == 2
    assert stats.pending_s >= 0.05
    assert stats.first_token_s + stats.decode_s + stats.pending_s <= stats.total_s


class Interrupter:
    """Plugin that interrupts after the second batch was evaluated."""

    n_batches = 0

    @hookimpl
    def llmaas_decode(self, step):
        self.n_batches += 1
        if self.n_batches == 2:
            raise InterruptedError


def test_an_interrupted_evaluation_leaves_no_logits(patched, make_llama):
    expected = greedy(make_llama(), PROMPT, 4)
    patched(interrupter=Interrupter())
    llama = make_llama()
    with pytest.raises(PluginError, match="InterruptedError"):
        greedy(llama, PROMPT, 4)
    assert llama.n_tokens == len(PROMPT)  # and the logits are those of one token more
    assert greedy(llama, PROMPT, 4) == expected


def test_exception_thrown_in_by_the_app(recorder, make_llama):
    generator = make_llama().generate(PROMPT)
    next(generator)
    with pytest.raises(KeyError):
        generator.throw(KeyError("app"))
    assert recorder.events == ONCE


def test_too_long_a_prompt_fails_as_ever(recorder, make_llama):
    llama = make_llama(n_ctx=32)
    with pytest.raises(ValueError, match="broadcast"):
        greedy(llama, list(range(300, 340)), 1)
    assert recorder.events == ["begin", "save", "end"]  # a prompt without room is not restored


def test_llama_closed_under_its_generator(recorder, make_llama):
    llama = make_llama()
    generator = llama.generate(PROMPT)
    next(generator)
    llama.close()
    generator.close()
    assert recorder.events == ["begin", "restore", "end"]  # there is no context left to save from


def test_llama_dropped_together_with_its_generator(recorder, reference_model):
    llama = llama_cpp.Llama(str(reference_model), n_ctx=256, verbose=False)
    generator = llama.generate(PROMPT)
    next(generator)
    both = [llama, generator]
    both.append(both)  # only the garbage collector frees them, in any order
    del llama, generator, both
    recorder.requests.clear()
    gc.collect()
    wait_until(lambda: recorder.events == ["begin", "restore", "end"])
    assert recorder.ended_on is not threading.current_thread()  # the thread that collected


def abandon(generator):
    """Leave a generator where only the garbage collector finds it."""
    cycle = [generator]
    cycle.append(cycle)


def test_an_abandoned_request_ends_when_the_next_begins(recorder, make_llama):
    llama = make_llama()
    first = llama.generate(PROMPT, temp=0.0)
    found = [next(first), next(first)]
    abandon(first)
    del first
    gc.collect()
    assert recorder.events == ["begin", "restore"]
    greedy(llama, [7, 8, 9], 1)
    assert recorder.events == ONCE * 2
    assert [stats.n_generated for stats in recorder.stats] == [2, 1]
    assert recorder.saves[0] == PROMPT + found[:-1]


def test_a_request_that_ends_late_does_not_disturb_the_next(recorder, make_llama):
    llama = make_llama()
    first, second = llama.generate(PROMPT, temp=0.0), llama.generate([7, 8, 9], temp=0.0)
    next(first)
    next(second)
    assert recorder.events == [*ONCE, "begin", "restore"]
    first.close()
    assert recorder.events == [*ONCE, "begin", "restore"]
    second.close()
    assert recorder.events == ONCE * 2
    assert recorder.saves == [PROMPT, [7, 8, 9]]


def test_generator_that_outlives_the_patches(patched, make_llama):
    recorder = Recorder()
    installed = patched(recorder=recorder)
    generator = make_llama().generate(PROMPT, temp=0.0)
    next(generator)
    installed.revert()
    assert recorder.events == ONCE
    next(generator)  # nobody watches its cells any more
    generator.close()
    assert recorder.events == ONCE
    assert recorder.saves == [PROMPT]


def test_a_request_that_another_thread_runs_is_not_saved_when_the_patches_go(patched, make_llama):
    recorder = Recorder()
    installed = patched(recorder=recorder)
    busy, goes_on = threading.Event(), threading.Event()

    def pause(tokens, scores):
        busy.set()
        goes_on.wait()
        return scores

    processors = LogitsProcessorList([pause])
    generator = make_llama().generate(PROMPT, temp=0.0, logits_processor=processors)
    thread = threading.Thread(target=lambda: next(generator))
    thread.start()
    busy.wait()
    installed.revert()
    assert recorder.events == ["begin", "restore"]
    goes_on.set()
    thread.join()
    generator.close()

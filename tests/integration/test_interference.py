"""An app that uses a context itself while a request of its own, or of another app, waits."""

from __future__ import annotations

import os
import signal
import sys
import threading

import llama_cpp
import pytest
from own_batches import batch_in, has_process, process
from parks import Parks
from requested import ONCE, PROMPT, greedy
from served import wait_until
from switching import OTHER, ask
from switching import PROMPT as LONG

from llmaas_hooks import hookimpl
from llmaas_hooks.request_scope import serving_context
from llmaas_plugins import activate, active_suite

OWN = [1, *range(500, 540)]


# -- paused requests -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "use",
    [
        lambda llama: llama.reset(),
        lambda llama: llama.eval([400]),
        lambda llama: batch_in(llama, 0),
        lambda llama: llama.load_state(llama.save_state()),
    ],
    ids=["reset", "eval", "batch", "state"],
)
def test_a_request_ends_before_the_app_uses_the_cells(recorder, make_llama, use):
    llama = make_llama()
    generator = llama.generate(PROMPT, temp=0.0)
    next(generator)
    use(llama)
    assert recorder.events == ONCE
    assert recorder.saved.tolist() == PROMPT
    generator.close()
    assert recorder.events == ONCE


def test_nothing_of_one_app_is_saved_for_another(recorder, make_llama):
    llama = make_llama()
    with serving_context(None, "mail"):
        generator = llama.generate(PROMPT, temp=0.0)
        next(generator)
    with serving_context(None, "notes"):
        llama.reset()
        llama.eval(OWN)
    generator.close()
    assert recorder.saves == [PROMPT]


def test_what_follows_in_the_generator_is_still_vanillas(recorder, make_llama):
    def answer(llama):
        generator = llama.generate(PROMPT, temp=0.0)
        found = [next(generator), next(generator)]
        llama.eval([400, 401])
        return [*found, next(generator), next(generator)]

    assert answer(make_llama()) == answer(make_llama())
    assert recorder.events == ONCE * 2


# -- sequences that plugins added ------------------------------------------------------------------


@pytest.fixture
def parks(patched):
    plugin = Parks()
    patched(parks=plugin)
    return plugin


@pytest.mark.parametrize("sequence", [1, 2])
def test_an_apps_batch_cannot_name_a_plugins_sequence(make, patched, sequence):
    plain = make()
    assert batch_in(plain, sequence) == -1
    expected = ask(plain, LONG, 4)[0]
    plugin = Parks()
    patched(parks=plugin)
    llama = make()
    assert ask(llama, LONG, 4)[0] == expected
    ask(llama, OTHER, 4)
    n_parked = plugin.parking.n_cells
    assert n_parked > 0
    assert batch_in(llama, sequence) == -1
    assert plugin.parking.n_cells == n_parked
    assert ask(llama, LONG, 4)[0] == expected


@has_process
def test_a_batch_that_hides_its_sequences_has_them_all(make, parks):
    llama = make()
    ask(llama, LONG, 4)
    ask(llama, OTHER, 4)
    assert parks.engine.parked
    assert process(llama, OWN, sequence=2) == 0
    assert not parks.engine.parked
    assert parks.engine.alteration == "llama_process"


# -- plugins that end meanwhile --------------------------------------------------------------------


def n_cells_of(llama, sequence):
    return 1 + llama_cpp.llama_memory_seq_pos_max(llama_cpp.llama_get_memory(llama.ctx), sequence)


class Ends:
    """Plugin that reverts the patches, on a thread of its own, inside a batch of its choice.

    Attributes:
        n_parked: Cells of the first parked sequence after that, still inside the batch.
    """

    def __init__(self):
        self.llama = self.revert = self.n_parked = None

    @hookimpl
    def llmaas_decode(self, step):
        if self.revert is not None:
            thread = threading.Thread(target=self.revert)
            self.revert = None
            thread.start()
            thread.join()
            (sequence,) = self.parked
            self.n_parked = n_cells_of(self.llama, sequence)


@pytest.mark.parametrize("by", ["request", "batch"])
def test_plugins_that_end_in_a_batch_leave_its_cells_alone(make, patched, by):
    plain = make()
    ask(plain, OTHER, 1)
    size = plain.save_state().llama_state_size
    parks, ends = Parks(), Ends()
    installed = patched(parks=parks, ends=ends)
    llama = make()
    ask(llama, LONG, 4)
    ask(llama, OTHER, 1)
    ends.parked = set(parks.engine.parked)
    ends.llama, ends.revert = llama, installed.revert
    if by == "request":
        ask(llama, [*OTHER, 700], 2)
        llama._ctx.kv_cache_seq_rm(0, len(OTHER), -1)
    else:
        llama._ctx.kv_cache_seq_rm(0, 4, -1)
        llama.n_tokens = 4
        llama.eval(OTHER[4:])
    assert ends.n_parked == len(LONG) + 3
    assert not parks.engine.parked
    (sequence,) = ends.parked
    assert n_cells_of(llama, sequence) == 0
    assert llama.save_state().llama_state_size == size


class Slow:
    """Plugin whose background work waits until it ``may_go``."""

    def __init__(self):
        self.may_go = threading.Event()

    @hookimpl
    def llmaas_kv_save(self, request):
        request.engine.defer(lambda: self.may_go.wait(60))


def running_in(thread):
    """Return the names of the functions that a thread is running."""
    frame, names = sys._current_frames()[thread], set()
    while frame is not None:
        names.add(frame.f_code.co_name)
        frame = frame.f_back
    return names


def test_ctrl_c_while_a_deactivation_waits(make):
    slow, here, before = Slow(), threading.get_ident(), llama_cpp.Llama.generate
    suite = activate({}, {"slow": slow})
    greedy(make(), PROMPT, 1)

    def interrupt():
        wait_until(lambda: {"deactivate", "settle", "wait"} <= running_in(here))
        os.kill(os.getpid(), signal.SIGINT)
        slow.may_go.set()

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        suite.deactivate()
    thread.join()
    assert active_suite() is None
    assert llama_cpp.Llama.generate is before
    with activate({}):
        assert llama_cpp.Llama.generate is not before
    assert llama_cpp.Llama.generate is before

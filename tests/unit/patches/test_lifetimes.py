"""Who frees a context and when: the rule of ``llmaas_patches.lifetimes``, without an engine."""

from __future__ import annotations

import gc
import itertools
import signal
import subprocess
import sys
import threading

import pytest
from forking import in_child
from interrupting import Interruption

from llmaas_patches import background, collecting
from llmaas_patches.background import BackgroundWork
from llmaas_patches.collecting import Collecting
from llmaas_patches.lifetimes import Lifetimes

MODEL = 100


class Life:
    """Contexts of one model, and the events of each on its thread."""

    def __init__(self):
        self.collecting = Collecting()
        self.background = BackgroundWork(self.collecting)
        self.lifetimes = Lifetimes(self.background, self.collecting)
        self.events = []
        self.lock = threading.Lock()  # a plugin's lock, which its save needs

    def make(self, *contexts):
        for ctx in contexts:
            self.lifetimes.context_made(ctx, MODEL)

    def save(self, ctx):
        def job():
            with self.lock:
                self.events.append(f"saved {ctx}")

        self.background.defer((ctx,), job)

    def free(self, ctx):
        def note(what):
            self.events.append(f"{what} {ctx}")
            if what == "freed":
                self.events.append(threading.current_thread().name)

        self.lifetimes.free_context(ctx, (ctx,), lambda: note("told"), lambda: note("freed"))

    def free_model(self):
        self.lifetimes.free_model(MODEL, lambda: self.events.append("model"))


@pytest.fixture
def life():
    life = Life()
    life.collecting.start()
    yield life
    life.background.close()
    life.collecting.stop()


class Owner:
    """Owner that frees its context when it goes, as ``Llama`` does."""

    def __init__(self, life, ctx):
        self.life, self.ctx = life, ctx

    def __del__(self):
        self.life.free(self.ctx)


def in_a_cycle(owner):
    owner.itself = owner
    return owner


HERE = threading.main_thread().name


def test_a_free_waits_for_the_save_and_is_over_when_it_returns(life):
    life.make(1)
    life.save(1)
    life.free(1)
    assert life.events == ["saved 1", "told 1", "freed 1", HERE]


def test_a_finalizer_under_a_lock_of_the_save_does_not_wait(life):
    life.make(1)
    owner = Owner(life, 1)
    with life.lock:
        life.save(1)
        del owner
        assert life.events == []
    life.lifetimes.settle()
    assert life.events == ["saved 1", "told 1", "freed 1", "llmaas-background"]


def test_the_collector_under_a_lock_of_the_save_does_not_wait(life):
    life.make(1)
    owner = in_a_cycle(Owner(life, 1))
    with life.lock:
        life.save(1)
        del owner
        gc.collect()
        assert life.events == []
    life.lifetimes.settle()
    assert life.events == ["saved 1", "told 1", "freed 1", "llmaas-background"]


def test_the_collector_does_not_call_plugins_even_where_nothing_is_deferred(life):
    life.make(1)
    del_on = Owner(life, 1)
    in_a_cycle(del_on)
    del del_on
    gc.collect()
    life.lifetimes.settle()
    assert life.events == ["told 1", "freed 1", "llmaas-background"]


def test_the_lane_finds_its_own_context_unused_any_more(life):
    life.make(1)
    owner = Owner(life, 1)
    gate = threading.Event()

    def job(owner=owner):
        gate.wait()
        life.events.append(f"saved {owner.ctx}")

    life.background.defer((1,), job)
    del owner, job
    gate.set()
    while "freed 1" not in life.events:  # the thread drops the job after the job is done
        life.background.settle(1)
    assert life.events == ["saved 1", "told 1", "freed 1", "llmaas-background"]


def test_a_signal_handler_on_top_of_a_waiting_call_does_not_wait(life):
    life.make(1)
    gate = threading.Event()
    life.background.defer((1,), gate.wait)

    def handler(*_):
        life.free(1)
        life.events.append("handled")
        gate.set()

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        main = threading.main_thread().ident
        threading.Timer(0.05, signal.pthread_kill, (main, signal.SIGUSR1)).start()
        life.background.settle(1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    life.lifetimes.settle()
    assert life.events == ["handled", "told 1", "freed 1", "llmaas-background"]


def test_a_free_that_is_interrupted_is_done_later(life):
    life.make(1)
    gate = threading.Event()
    life.background.defer((1,), gate.wait)
    main = threading.main_thread().ident
    threading.Timer(0.05, signal.pthread_kill, (main, signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        life.free(1)
    assert life.events == []
    gate.set()
    life.lifetimes.settle()
    assert life.events == ["told 1", "freed 1", "llmaas-background"]


def test_ctrl_c_anywhere_before_a_free_loses_neither_context_nor_model():
    for n in itertools.count(1):
        life = Life()
        life.make(1)
        life.save(1)
        with Interruption(n, background, collecting) as interruption:
            life.free(1)
        with Interruption(n, background, collecting) as second:
            life.free_model()
        life.lifetimes.settle()
        life.background.close()
        assert life.events.count("freed 1") == life.events.count("told 1") == 1, interruption.where
        assert life.events[-1] == "model", (interruption.where, second.where)
        if not interruption.came:
            break
    assert n > 20


@pytest.mark.parametrize("order", [(1, 2, "model"), ("model", 1, 2), (2, "model", 1)], ids=str)
def test_a_model_goes_after_its_contexts(life, order):
    life.make(1, 2)
    for one in order:
        life.free_model() if one == "model" else life.free(one)
    assert life.events.count("model") == 1
    assert life.events[-1] == "model" or life.events[-2:] == ["freed 2", HERE]
    freed = [event for event in life.events if event.startswith(("freed", "model"))]
    assert freed[-1] == "model"


def test_a_model_waits_for_a_context_in_line(life):
    life.make(1)
    gate = threading.Event()
    life.background.defer((1,), gate.wait)
    owner = Owner(life, 1)
    del owner
    threading.Timer(0.05, gate.set).start()
    life.free_model()
    assert life.events == ["told 1", "freed 1", "llmaas-background", "model"]


def test_a_model_in_a_cycle_with_its_context_goes_after_it(life):
    class Model:
        def __del__(self):
            life.free_model()

    for first in (True, False):
        life.events.clear()
        life.make(1)
        both = [Model(), Owner(life, 1)] if first else [Owner(life, 1), Model()]
        both.append(both)
        del both
        gc.collect()
        life.lifetimes.settle()
        assert life.events == ["told 1", "freed 1", "llmaas-background", "model"]


def test_a_new_context_may_get_the_address_while_the_free_ends(life):
    life.make(1)
    life.lifetimes.free_context(1, (1,), lambda: None, lambda: life.make(1))
    life.free_model()
    assert life.events == []  # for the new one is there
    life.free(1)
    assert life.events == ["told 1", "freed 1", HERE, "model"]


def test_what_fails_in_a_plugin_frees_all_the_same(life):
    def fail():
        raise ValueError("oops")

    life.make(1)
    life.free_model()
    with pytest.raises(ValueError, match="oops"):
        life.lifetimes.free_context(1, (1,), fail, lambda: life.events.append("freed"))
    assert life.events == ["freed", "model"]


def test_after_close_frees_are_done_at_once(life):
    life.make(1, 2)
    life.background.close()
    life.free(1)
    owner = in_a_cycle(Owner(life, 2))
    del owner
    gc.collect()
    assert life.events == ["told 1", "freed 1", HERE, "told 2", "freed 2", HERE]


# Python 3.12 warns about threads
FORKS = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


INTERRUPTED = """
import gc, signal, sys, time
from llmaas_patches.collecting import Collecting

sys.unraisablehook = lambda _: None  # what a finalizer or another callback was interrupted with
collecting, seen = Collecting(), []

class Garbage:
    def __init__(self):
        self.myself = self
    def __del__(self):
        seen.append(collecting.here())

collecting.start()
signal.signal(signal.SIGALRM, signal.default_int_handler)
end = time.monotonic() + 0.5
n_interrupted = 0
while time.monotonic() < end:
    try:
        signal.setitimer(signal.ITIMER_REAL, 5e-5)
        for _ in range(50):  # an interrupt in a finalizer comes to nobody
            Garbage()
            gc.collect(0)
    except KeyboardInterrupt:
        n_interrupted += 1
    assert not collecting.here()
Garbage()
gc.collect()
assert n_interrupted > 100 and seen[-1], (n_interrupted, seen[-1:])
"""


def test_an_interrupt_cannot_hide_the_end_of_a_collection():
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


@FORKS
def test_a_child_that_is_forked_beside_a_collection_collects_nowhere(life):
    codes = []

    class Forking:
        def __init__(self):
            self.myself = self

        def __del__(self):
            assert life.collecting.here()
            thread = threading.Thread(target=lambda: codes.append(in_child(work)))
            thread.start()
            thread.join()

    def work():
        found = [life.collecting.here()]
        thread = threading.Thread(target=lambda: found.append(life.collecting.here()))
        thread.start()  # the thread may get the collecting thread's id
        thread.join()
        assert found == [False, False]

    Forking()
    gc.collect()
    assert codes == [0]


@FORKS
def test_a_child_does_none_of_its_parents_work_but_frees(life, monkeypatch):
    life.make(1, 2)
    with monkeypatch.context() as patch:
        patch.setattr(life.background, "_start", lambda: False)  # all jobs stay queued
        life.save(1)
        owner = Owner(life, 2)
        del owner

        def work():
            patch.undo()
            life.free(1)
            life.free_model()
            frees = ["told 1", "freed 1", HERE, "told 2", "freed 2", "llmaas-background", "model"]
            assert life.events == frees
            life.save(3)
            life.background.close()
            assert life.events[-1] == "saved 3"

        assert in_child(work) == 0
    life.free(1)
    life.lifetimes.settle()
    done = {"saved 1", "told 1", "freed 1", HERE, "told 2", "freed 2", "llmaas-background"}
    assert set(life.events) == done


@FORKS
def test_a_fork_waits_for_the_job_that_runs(life):
    gate, is_running = threading.Event(), threading.Event()

    def job():
        is_running.set()
        gate.wait()
        life.events.append("done")

    life.background.defer((1,), job)
    is_running.wait()
    threading.Timer(0.05, gate.set).start()

    def work():
        assert life.events == ["done"]

    assert in_child(work) == 0


@FORKS
def test_a_fork_inside_a_lock_of_the_running_job_does_not_wait(life):
    owner = in_a_cycle(Forker(life))
    with life.lock:
        life.save(1)
        del owner
        gc.collect()
    life.background.settle(1)
    assert life.events == ["child ended", "saved 1"]


class Forker:
    """Object that forks inside the collector."""

    def __init__(self, life):
        self.life = life

    def __del__(self):
        assert in_child(lambda: None) == 0
        self.life.events.append("child ended")

"""Contexts freed at any moment: at exit, in a forked child, during their own save."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading

import fork_server
import pytest
from llama_cpp import Llama

from llmaas_hooks import LlmaasError, hookimpl

TEXT = "The quick brown fox jumps over the lazy dog and then it runs away. " * 12
OTHER = "Some other text about mail and calendars, which is long enough. " * 8

SCRIPT = """
import os, signal, sys, warnings
from llama_cpp import Llama
from llmaas_plugins import activate
from llmaas_plugins.reference_model import reference_model_path

signal.alarm(50)
warnings.simplefilter("ignore")  # of forks in a process with threads
TEXT, OTHER = {TEXT!r}, {OTHER!r}

def start():
    exact = {{"codec": "lossless", "recompute": False}}
    return activate({{"plugins": {{"kv_chunks": {{"store": sys.argv[1], **exact}}}}}})

def opened():
    settings = {{"n_ctx": 512, "n_threads": 1, "n_threads_batch": 1, "verbose": False}}
    return Llama(str(reference_model_path()), **settings)

def ask(llama, text):
    return llama.create_completion(text, max_tokens=4, temperature=0)["choices"][0]["text"]
"""


def run(script, *arguments, start=fork_server.run):
    """Run a script in a process that must end well and silently; return its output."""
    command = [sys.executable, "-c", SCRIPT.format(TEXT=TEXT, OTHER=OTHER) + script, *arguments]
    done = start([*map(str, command)], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr[-2000:]
    return done.stdout


AT_EXIT = {
    "at once": "",
    "with an open stream": """
stream = llama.create_completion(OTHER, max_tokens=50, temperature=0, stream=True)
next(stream)
""",
    "in a cycle": "llama.itself = llama; del llama",
    "in a child, too": """
if os.fork() == 0:
    ask(llama, OTHER)
    sys.exit()
os.wait()
""",
    "twice active": "start()",
}


# These run in an interpreter of their own, and the others in a forked one.
ALONE = ("at once", "in a cycle")


@pytest.mark.slow
@pytest.mark.parametrize("end", AT_EXIT)
def test_an_exit_without_deactivating_loses_nothing(tmp_path, end):
    begun = "import logging; logging.basicConfig(); start(); llama = opened(); ask(llama, TEXT)\n"
    start = subprocess.run if end in ALONE else fork_server.run
    run(begun + AT_EXIT[end], tmp_path, start=start)
    reused = run(
        "suite = start(); llama = opened(); ask(llama, TEXT)\n"
        "print(suite.status()['plugins']['kv_chunks']['reused_tokens'])",
        tmp_path,
    )
    assert int(reused) > 100


OPEN = """
stream = llama.generate(llama.tokenize(TEXT.encode()), temp=0.0)
said = [next(stream) for _ in range(20)]
"""
ENDS = {
    "the exit": "",
    "deactivating": """
suite.deactivate()
said += [next(stream) for _ in range(20)]
stream.close()
again = opened()
vanilla = again.generate(again.tokenize(TEXT.encode()), temp=0.0)
assert said == [next(vanilla) for _ in range(40)]
""",
    "deactivating while another thread asks": """
import threading
other, is_busy, is_over = opened(), threading.Event(), threading.Event()
def work():
    while not is_over.is_set():
        for _ in zip(other.generate(other.tokenize(OTHER.encode()), temp=0.0), range(40)):
            is_busy.set()
thread = threading.Thread(target=work)
thread.start()
is_busy.wait()
suite.deactivate()
is_over.set()
thread.join()
""",
}


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_a_request_that_is_open_at_the_end_is_stored_as_far_as_it_got(tmp_path, end):
    begun = "suite = start(); llama = opened()" + OPEN
    run(begun + end, tmp_path)
    report = "stream.close(); print(suite.status()['plugins']['kv_chunks']['reused_tokens'])"
    assert int(run(begun + report, tmp_path)) > 100


FORK = """
with start():
    llama = opened()
    ask(llama, TEXT)
    pid = os.fork()  # its save is still to be done
    if pid == 0:
        print(repr([ask(llama, OTHER), ask(llama, TEXT + "x"), ask(llama, TEXT)]), flush=True)
        llama.close()
        again = opened()
        print(repr(ask(again, OTHER)), flush=True)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    ask(llama, OTHER)
    llama.close()
"""
VANILLA = """
llama = opened()
print(repr([ask(llama, OTHER), ask(llama, TEXT + "x"), ask(llama, TEXT)]))
print(repr(ask(llama, OTHER)))
"""


@pytest.mark.slow
def test_a_forked_child_goes_on_with_its_parents_llama(tmp_path):
    assert run(FORK, tmp_path) == run(VANILLA)


BUSY = """
import threading
with start():
    llamas = [opened() for _ in range(3)]
    is_over = threading.Event()
    def work(llama):
        while not is_over.is_set():
            ask(llama, TEXT)
            ask(llama, OTHER)
    threads = [threading.Thread(target=work, args=(llama,)) for llama in llamas[1:]]
    for thread in threads:
        thread.start()
    for i in range(8):
        ask(llamas[0], TEXT[i:])
        pid = os.fork()
        if pid == 0:
            ask(llamas[0], OTHER)
            ask(llamas[0], TEXT)
            llamas[0].close()
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
    is_over.set()
    for thread in threads:
        thread.join()
"""


@pytest.mark.slow
def test_children_of_a_busy_parent_are_not_stuck(tmp_path):
    run(BUSY, tmp_path)


class Saver:
    """Plugin whose save takes a lock, and which records events."""

    def __init__(self, lock):
        self.lock, self.events = lock, []

    @hookimpl
    def llmaas_kv_save(self, request, tokens):
        def job():
            with self.lock:
                self.events.append("saved")

        request.engine.defer(job)

    @hookimpl
    def llmaas_context_free(self, ctx):
        with self.lock:
            self.events.append("freed")

    @hookimpl
    def llmaas_native_context(self, context):
        gc.collect()  # inside the creation of a context


def begun(model):
    llama = Llama(str(model), n_ctx=64, n_threads=1, verbose=False)
    generator = llama.generate([1, 2, 3], temp=0.0)
    next(generator)
    generator.close()
    return llama


def test_a_llama_that_is_dropped_under_its_save(patched, reference_model):
    saver = Saver(threading.Lock())
    installed = patched(saver=saver)
    for is_cycle in (False, True):
        with saver.lock:
            llama = begun(reference_model)
            llama.itself = llama if is_cycle else None
            del llama
            gc.collect()
            assert saver.events == []
        installed.settle()
        assert saver.events == ["saved", "freed"]
        saver.events.clear()


def test_a_llama_that_is_dropped_while_another_one_is_made(patched, reference_model):
    saver = Saver(threading.Lock())
    installed = patched(saver=saver)
    llama = begun(reference_model)
    llama.itself = llama
    gc.disable()
    try:
        del llama
        with saver.lock:
            begun(reference_model)
    finally:
        gc.enable()
    installed.settle()
    assert saver.events == ["saved", "freed"] * 2


def test_a_closed_llama_is_gone_when_close_returns(patched, reference_model):
    saver = Saver(threading.Lock())
    patched(saver=saver)
    llama = begun(reference_model)
    llama.close()
    assert saver.events == ["saved", "freed"]


class Ends:
    """Plugin that records when requests and contexts end."""

    def __init__(self):
        self.events = []

    @hookimpl
    def llmaas_request_end(self, request):
        self.events.append("ended")

    @hookimpl
    def llmaas_context_free(self, ctx):
        self.events.append("freed")


def opened_stream(model):
    llama = Llama(str(model), n_ctx=64, n_threads=1, verbose=False)
    stream = llama.generate([1, 2, 3], temp=0.0)
    next(stream)
    return llama, stream


def test_a_request_ends_before_its_context_goes(patched, reference_model):
    """A later end could be attributed to the next context, which may have the same address."""
    ends = Ends()
    patched(ends=ends)
    llama, stream = opened_stream(reference_model)
    llama.close()
    assert ends.events == ["ended", "freed"]
    stream.close()
    assert ends.events == ["ended", "freed"]


def test_a_stream_that_is_garbage_with_its_llama_ends(patched, reference_model):
    ends = Ends()
    installed = patched(ends=ends)
    both = [*opened_stream(reference_model)]
    both.append(both)
    del both
    gc.collect()
    installed.settle()
    assert ends.events == ["ended", "freed"]


class Asking:
    """Garbage that uses a live engine when it is collected."""

    def __init__(self, use, errors):
        self.use, self.errors, self.itself = use, errors, self

    def __del__(self):
        try:
            self.use()
        except LlmaasError as error:
            self.errors.append(str(error))


USES = {
    "asks": lambda llama: next(llama.generate([4, 5, 6], temp=0.0)),
    "evaluates": lambda llama: llama.eval([4]),
    "empties it": lambda llama: llama._ctx.kv_cache_clear(),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_a_finalizer_that_would_wait_for_a_save_is_refused(patched, reference_model, use):
    """The collector runs while holding a lock that the save needs."""
    saver, errors = Saver(threading.Lock()), []
    installed = patched(saver=saver)
    with saver.lock:
        llama = begun(reference_model)
        Asking(lambda: use(llama), errors)
        gc.collect()
    assert len(errors) == 1
    assert "garbage collector" in errors[0]
    installed.settle()
    assert saver.events == ["saved"]
    llama.eval([4])
    llama.close()


@pytest.mark.slow
def test_children_of_a_parent_that_activates_have_all_or_nothing(tmp_path):
    """A thread activates and deactivates all the time; its children do the same, and answer."""
    run(
        """
import logging, tempfile, threading, time
from llama_cpp import llama_cpp
from llmaas_plugins import active_suite
logging.disable()  # the model has no levels
original, is_over = llama_cpp.llama_decode, threading.Event()
plugins = {"kv_chunks": {"store": sys.argv[1]}, "elastic": {}}

def work():
    while not is_over.is_set():
        activate({"plugins": plugins}).deactivate()

def child():
    while active_suite() is not None:
        active_suite().deactivate()
    with activate({"on_error": "raise", "plugins": plugins | {"kv_chunks": {"store": folder}}}):
        ask(opened(), TEXT)
    assert llama_cpp.llama_decode is original, "patches are left"

thread = threading.Thread(target=work)
thread.start()
for i in range(12):
    time.sleep(0.004 * i)
    with tempfile.TemporaryDirectory() as folder:
        pid = os.fork()
        if pid == 0:
            signal.alarm(20)
            code = 1
            try:
                child()
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(pid, 0)[1] == 0, i
is_over.set()
thread.join()
""",
        tmp_path,
    )

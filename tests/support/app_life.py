"""An app whose contexts come and go at random, for ``life_driver.py``."""

from __future__ import annotations

import faulthandler
import gc
import os
import random
import signal
import threading
import traceback
from collections import Counter

from budgets import is_streamed, make_room, squeeze
from llama_cpp import Llama, llama_cpp

from llmaas_hooks import LlmaasError, serving_context
from llmaas_plugins import activate

MOST_ENGINES = 3
HANGS_AFTER_S = 30
SANITIZED = "libasan" in os.environ.get("LD_PRELOAD", "")
"""Whether ASan runs. A child that is forked while a thread allocates cannot allocate (GCC 12)."""
SETTINGS = {"n_ctx": 512, "n_threads": 1, "n_threads_batch": 1, "verbose": False, "seed": 1}
DONE = {"kv_chunks": ["reused_tokens"], "knn_lm": ["proposed", "mixed"]}
START = "The quick brown fox jumps over the lazy dog and then it runs away. "
PROMPTS = [
    START * 4,
    START * 6 + "Nobody saw it",
    START * 6 + "Everybody saw it and",
    "Some other text about mail and calendars, which is long enough. " * 5,
    "Short and",
    "User: Who feeds Bruno?\nAssistant: Anna feeds Bruno at seven, before",
    "User: When is the boat?\nAssistant: The boat leaves at",
]
N_TOKENS = 8


def answer(llama, prompt, late=()):
    """Return the text; drop ``late``, streams of closed engines, while it is generated."""
    text = ""
    for part in llama.create_completion(prompt, max_tokens=N_TOKENS, temperature=0, stream=True):
        text += part["choices"][0]["text"]
        if late:
            late.clear()
    return text


def make_context_beside(llama, may_be_refused):
    """Make another context of an engine's model, and free it; it may be refused."""
    params = llama_cpp.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_threads, params.n_threads_batch = 64, 8, 1, 1
    try:
        ctx = llama_cpp.llama_init_from_model(llama.model, params)
    except LlmaasError:
        assert may_be_refused
    else:
        assert ctx
        llama_cpp.llama_free(ctx)


class Cycle:
    """Reference cycle that keeps an engine alive until the collector finds both."""

    def __init__(self, llama):
        self.llama, self.itself = llama, self


class Life:
    """One seed: the engines, the suite, and the expected answer to each prompt.

    Attributes:
        done: Names and counts of the plugins' actions.
    """

    def __init__(self, seed, plugins, model, expected):
        self.random = random.Random(seed)
        self.config = {"on_error": "raise", "plugins": plugins}
        self.is_streamed = "flash_weights" in plugins
        self.kind = "mixed" if plugins.get("knn_lm", {}).get("mix") else "vanilla"
        self.model, self.expected = model, expected
        self.engines, self.late = [], []
        self.done = Counter()
        self.suite = activate(self.config)

    def end(self):
        for llama in self.engines:
            llama.close()
        self.suite.deactivate()

    def count(self):
        """Record the plugins' highest counters so far; draft counters end with their engines."""
        whole = self.suite.status()
        assert whole["errors"] == {}, whole["errors"]
        status = whole["plugins"]
        for plugin, names in DONE.items():
            for name in names:
                found = status.get(plugin, {}).get(name, 0)
                self.done[name] = max(self.done[name], found)
        for model in status.get("flash_weights", {}).get("models", ()):
            self.done["streamed"] += is_streamed(model)

    def make(self):
        if self.is_streamed:
            make_room(self.suite.plugin("flash_weights"))
        llama = Llama(self.model, **SETTINGS)
        if self.is_streamed:
            self.change_budget()
        llama.kind, llama.suite = self.kind, self.suite
        return llama

    def engine(self):
        if not self.engines:
            self.begin()
        return self.random.choice(self.engines)

    def check(self, llama, prompt):
        found, expected = answer(llama, prompt, self.late), self.expected[llama.kind][prompt]
        assert found == expected, (prompt[-30:], found, expected)

    # -- operations -----------------------------------------------------------------------------

    def begin(self):
        if len(self.engines) == MOST_ENGINES:
            self.engines.pop().close()
        self.engines.append(self.make())

    def ask(self):
        with serving_context(self.random.choice([None, "a", "b"])):
            self.check(self.engine(), self.random.choice(PROMPTS))

    def abandon(self):
        """Leave a stream behind: closed, dropped, or in a cycle for the collector."""
        llama, prompt = self.engine(), self.random.choice(PROMPTS)
        stream = llama.create_completion(prompt, max_tokens=8, temperature=0, stream=True)
        for _ in range(self.random.randrange(3)):
            next(stream)
        how = self.random.randrange(3)
        if how == 0:
            stream.close()
        elif how == 1:
            Cycle(stream)
        del stream

    def drop(self):
        """Drop an engine: closed, released, or in a cycle, perhaps with its stream."""
        llama = self.engine()
        self.engines.remove(llama)
        self.check(llama, self.random.choice(PROMPTS))  # give the engine something to save
        how = self.random.randrange(5)
        if how == 0:
            llama.close()
        elif how == 1:
            Cycle(llama)
        elif how == 2:
            stream = llama.create_completion("And", max_tokens=3, temperature=0, stream=True)
            next(stream)
            Cycle((llama, stream))
            del stream
        elif how == 3:
            self.late.append(llama.create_completion("And", max_tokens=3, stream=True))
            next(self.late[-1])
            llama.close()
        del llama

    def replace(self):
        """Drop an engine in a cycle; collect it while another one is made and asked."""
        self.drop()
        self.begin()
        self.check(self.engines[-1], self.random.choice(PROMPTS))

    def fork(self):
        """Fork a child that continues with an engine and ends in one of several ways."""
        self.in_child(self.engine(), self.random.randrange(3))

    def may_refuse(self, llama):
        """Return whether an earlier activation may keep the weights of an engine's model."""
        return self.is_streamed and llama.suite is not self.suite

    def in_child(self, llama, how):
        prompts = self.random.sample(PROMPTS, 2)
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                faulthandler.register(signal.SIGALRM, chain=True)
                signal.alarm(HANGS_AFTER_S - 5)
                for prompt in prompts:
                    self.check(llama, prompt)
                if how == 3:
                    one = self.random.choice(self.engines)
                    if self.is_streamed:  # a squeezed budget has no room for another context
                        make_room(self.suite.plugin("flash_weights"))
                    make_context_beside(one, self.may_refuse(one))
                assert self.suite.status()["errors"] == {}
                if how == 1:
                    self.engines.clear()
                    del llama
                    gc.collect()
                elif how == 2:
                    self.end()
                code = 0
            except BaseException:
                traceback.print_exc()
            os._exit(code)
        status = os.waitpid(pid, 0)[1]
        assert status == 0, f"a child that does {how} ended with {status}"

    def interrupt(self):
        """Drop an engine in a signal handler while another engine works."""
        llama = self.engine()
        others = [one for one in self.engines if one is not llama]

        def handler(*_):
            if others:
                one = others.pop()
                self.engines.remove(one)
                one.close() if is_closed else Cycle(one)

        is_closed = self.random.random() < 0.5
        before = signal.signal(signal.SIGALRM, handler)
        try:
            signal.setitimer(signal.ITIMER_REAL, self.random.uniform(0.0005, 0.05))
            self.check(llama, self.random.choice(PROMPTS))
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

    def cancel(self):
        """Interrupt a request by Ctrl-C at any moment; later answers must be right."""
        llama = self.engine()

        def handler(*_):
            raise KeyboardInterrupt

        before = signal.signal(signal.SIGALRM, handler)
        try:
            signal.setitimer(signal.ITIMER_REAL, self.random.uniform(0.0005, 0.05))
            self.check(llama, self.random.choice(PROMPTS))
            signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt:
            signal.setitimer(signal.ITIMER_REAL, 0)
        finally:
            signal.signal(signal.SIGALRM, before)
        self.check(llama, self.random.choice(PROMPTS))

    def threads(self):
        """Run two engines on threads while budgets change and a child runs a third."""
        while len(self.engines) < MOST_ENGINES:
            self.begin()
        Cycle(self.make())
        failed = []

        def work(llama, prompt):
            try:
                self.check(llama, prompt)
            except BaseException as error:
                failed.append(error)

        pairs = zip(self.engines[:2], self.random.choices(PROMPTS, k=2), strict=True)
        threads = [threading.Thread(target=work, args=pair) for pair in pairs]
        for thread in threads:
            thread.start()
        if self.is_streamed:
            self.change_budget()
        if not SANITIZED:
            self.in_child(self.engines[-1], self.random.choice([0, 3]))
        for thread in threads:
            thread.join()
        assert not failed, failed

    def squeeze(self):
        """Set a memory budget that streams as many weights as possible."""
        llama = self.engine()
        if self.is_streamed:
            self.change_budget()
        self.check(llama, self.random.choice(PROMPTS))

    def stream(self):
        """Answer with streamed weights, if chance has left this life without any."""
        tries = range(5) if self.is_streamed else ()  # freed memory may hold all weights meanwhile
        for _ in tries:
            if self.done["streamed"]:
                return
            llama = self.make()
            llama.eval(
                [1] * (llama.n_ctx() - 1)
            )  # touches compute buffers, which hold weights else
            squeeze(self.suite.plugin("flash_weights"))
            for prompt in PROMPTS:
                self.check(llama, prompt)
            self.count()
            llama.close()

    def change_budget(self):
        """Set a memory budget slightly above the least one."""
        squeeze(self.suite.plugin("flash_weights"), self.random.randrange(4))

    def evict(self):
        self.suite.evict(self.random.choice("ab"))

    def activate_anew(self):
        """Activate anew while engines are open; the next activation leaves these alone."""
        if self.random.random() < 0.5:
            self.drop()
        self.suite.deactivate()
        for llama in self.engines:
            llama.kind = "vanilla"
        self.suite = activate(self.config)

    OPERATIONS = {  # noqa: RUF012  a table, by weight
        begin: 2,
        ask: 6,
        abandon: 4,
        drop: 4,
        replace: 4,
        fork: 3,
        interrupt: 4,
        cancel: 3,
        threads: 2,
        squeeze: 2,
        evict: 1,
        activate_anew: 1,
    }

    def round(self, note):
        operation = self.random.choices(*zip(*self.OPERATIONS.items(), strict=True))[0]
        threshold = int(10 ** self.random.uniform(0.5, 3.5))
        note(f"{operation.__name__}, threshold {threshold}")
        gc.set_threshold(threshold, self.random.choice([1, 10]), self.random.choice([1, 10]))
        operation(self)
        self.count()

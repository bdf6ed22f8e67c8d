"""Contexts that come and go at random, in an app whose texts must stay those of vanilla.

    life_driver.py FIRST_SEED N_SEEDS N_ROUNDS FOLDER PLUGINS MODEL

A seed is one life of N_ROUNDS rounds. Each moves the collector's threshold and does one thing:
ask, abandon a stream, drop an engine in one of several ways, fork, be interrupted by a signal that
drops one, be interrupted by Ctrl-C, ask on two threads, change the memory budget, evict,
activate anew. Where knn_lm mixes, texts must be those of knn_lm alone.
A failure is written with its seed, round and operation; a crash or a hang leaves the last one in
FOLDER/operation. At the end, what the plugins did is printed as JSON.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import json
import os
import random
import re
import signal
import sys
import threading
import traceback
import weakref
from collections import Counter
from pathlib import Path

from llama_cpp import Llama

from llmaas_hooks import BudgetError
from llmaas_patches import serving_context
from llmaas_plugins import activate
from llmaas_plugins.knn_lm.drafts import DatastoreDraft
from llmaas_plugins.machine import resident_bytes

MOST_ENGINES = 3
HANGS_AFTER_S = 30
MIB = 1 << 20
ROOM = 100 * MIB
"""Enough for a model to be loaded; less than what would let flash_weights leave it alone."""
SETTINGS = {"n_ctx": 512, "n_threads": 1, "n_threads_batch": 1, "verbose": False, "seed": 1}
CHEAP = {1: 1.0, 2: 1.1, 4: 1.2, 8: 1.4}
"""Batches so cheap that something is proposed where hardly anything is known."""
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
    """The text; ``late`` are streams of closed engines, to be dropped in the middle of it."""
    text = ""
    for part in llama.create_completion(prompt, max_tokens=N_TOKENS, temperature=0, stream=True):
        text += part["choices"][0]["text"]
        if late:
            late.clear()
    return text


class Cycle:
    """Keeps an engine until the collector finds both."""

    def __init__(self, llama):
        self.llama, self.itself = llama, self


class Life:
    """One seed: the engines, the suite, and what each prompt must be answered with.

    Attributes:
        done: What the plugins did, by name.
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
        """Note the most of what the plugins have done so far; drafts go with their engines."""
        whole = self.suite.status()
        assert whole["errors"] == {}, whole["errors"]
        status = whole["plugins"]
        for plugin, names in DONE.items():
            for name in names:
                found = status.get(plugin, {}).get(name, 0)
                self.done[name] = max(self.done[name], found)
        for model in status.get("flash_weights", {}).get("models", ()):
            self.done["streamed"] += model["kept_bytes"] < model["bytes"] < model["read_bytes"]

    def make(self):
        if self.is_streamed:
            flash = self.suite.plugin("flash_weights")
            flash.set_memory_budget(resident_bytes() + ROOM)
        llama = Llama(self.model, **SETTINGS)
        if self.is_streamed:
            self.change_budget()
        llama.kind = self.kind
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
        """Leave a stream: closed, dropped, or where the collector finds it."""
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
        """Let an engine go: closed, dropped, or in a cycle, perhaps before or with its stream."""
        llama = self.engine()
        self.engines.remove(llama)
        self.check(llama, self.random.choice(PROMPTS))  # so that it has a save to do
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
        """Drop one in a cycle, and be found by the collector while another is made and asked."""
        self.drop()
        self.begin()
        self.check(self.engines[-1], self.random.choice(PROMPTS))

    def fork(self):
        """A child goes on with an engine, and ends in one of several ways."""
        self.in_child(self.engine(), self.random.randrange(3))

    def in_child(self, llama, how):
        prompts = self.random.sample(PROMPTS, 2)
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                signal.alarm(HANGS_AFTER_S - 5)
                for prompt in prompts:
                    self.check(llama, prompt)
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
        """A signal drops an engine while another one works."""
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
        """Ctrl-C at any moment of a request; what follows is right again."""
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
        """Two engines work on threads; budgets change, and a child goes on with a third one."""
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
        if not self.is_streamed:
            self.in_child(self.engines[-1], 0)
        for thread in threads:
            thread.join()
        assert not failed, failed

    def squeeze(self):
        """Stream as many weights as a new budget wants."""
        llama = self.engine()
        if self.is_streamed:
            self.change_budget()
        self.check(llama, self.random.choice(PROMPTS))

    def change_budget(self):
        """Set one a little above the least, which a refusal names."""
        flash = self.suite.plugin("flash_weights")
        try:
            flash.set_memory_budget(0)
        except BudgetError as error:
            least = int(re.search(r"expected (\d+) MiB", str(error))[1])
            with contextlib.suppress(BudgetError):  # the process has grown meanwhile
                flash.set_memory_budget((least + self.random.randrange(4)) * MIB)

    def evict(self):
        self.suite.evict(self.random.choice("ab"))

    def activate_anew(self):
        """With engines open, which the next activation leaves alone."""
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


def texts(model):
    """Return the answer to each prompt, with empty cells."""
    with contextlib.closing(Llama(model, **SETTINGS)) as llama:
        found = {}
        for prompt in PROMPTS:
            llama.reset()
            found[prompt] = answer(llama, prompt)
        return found


def live(life, n_rounds, note):
    """Do the rounds, and see that the engines end with the life."""
    for i in range(n_rounds):
        life.round(functools.partial(note, i))
    note(n_rounds, "end")
    alive = [weakref.ref(llama) for llama in life.engines]
    life.end()
    life.engines.clear()
    gc.collect()
    assert not any(ref() for ref in alive), "engines outlive their life"


def main():
    first, n_seeds, n_rounds = map(int, sys.argv[1:4])
    folder, plugins, model = Path(sys.argv[4]), json.loads(sys.argv[5]), sys.argv[6]
    if "kv_chunks" in plugins:
        plugins["kv_chunks"]["store"] = str(folder / "kv")
    DatastoreDraft.__init__.__kwdefaults__["costs"] = CHEAP
    knn = {name: table for name, table in plugins.items() if name == "knn_lm"}
    expected = {"vanilla": texts(model)}
    with activate({"on_error": "raise", "plugins": knn}):
        expected["mixed"] = texts(model)
    done, doing = Counter(), ""
    for seed in range(first, first + n_seeds):

        def note(i, operation, seed=seed):
            nonlocal doing
            doing = f"seed {seed}, round {i}: {operation}"
            (folder / "operation").write_text(doing)
            faulthandler.dump_traceback_later(HANGS_AFTER_S, exit=True)

        try:
            life = Life(seed, plugins, model, expected)
            live(life, n_rounds, note)
        except BaseException:
            traceback.print_exc()
            sys.exit(doing)
        done += life.done
    faulthandler.cancel_dump_traceback_later()
    done["words_mixed"] = sum(expected["mixed"][one] != expected["vanilla"][one] for one in PROMPTS)
    json.dump(done, sys.stdout)


if __name__ == "__main__":
    main()

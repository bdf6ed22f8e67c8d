"""Contexts that come and go at random, in an app whose texts must stay those of vanilla.

    life_driver.py FIRST_SEED N_SEEDS N_ROUNDS FOLDER PLUGINS MODEL

A seed is one life of N_ROUNDS rounds. Each moves the collector's threshold and does one thing:
ask, abandon a stream, drop an engine in one of several ways, fork, be interrupted by a signal that
drops one, be interrupted by Ctrl-C, ask on two threads, look at the suite, evict, activate anew.
What failed is written with its seed, round and operation; a crash or a hang leaves the last one in
FOLDER/operation.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import os
import random
import signal
import sys
import threading
import traceback
import weakref
from pathlib import Path

from llama_cpp import Llama

from llmaas_patches import serving_context
from llmaas_plugins import activate

MOST_ENGINES = 3
HANGS_AFTER_S = 30
SETTINGS = {"n_ctx": 512, "n_threads": 1, "n_threads_batch": 1, "verbose": False, "seed": 1}
START = "The quick brown fox jumps over the lazy dog and then it runs away. "
PROMPTS = [
    START * 4,
    START * 6 + "Nobody saw it",
    START * 6 + "Everybody saw it and",
    "Some other text about mail and calendars, which is long enough. " * 5,
    "Short and",
]


def answer(llama, prompt, n=4):
    return llama.create_completion(prompt, max_tokens=n, temperature=0)["choices"][0]["text"]


class Cycle:
    """Keeps an engine until the collector finds both."""

    def __init__(self, llama):
        self.llama, self.itself = llama, self


class Life:
    """One seed: the engines, the suite, and what vanilla says to each prompt."""

    def __init__(self, seed, config, model, expected):
        self.random = random.Random(seed)
        self.config, self.model, self.expected = config, model, expected
        self.engines = []
        self.garbage = []
        self.suite = activate(config)

    def end(self):
        for llama in self.engines:
            llama.close()
        self.suite.deactivate()

    def engine(self):
        if not self.engines:
            self.begin()
        return self.random.choice(self.engines)

    def check(self, llama, prompt):
        found = answer(llama, prompt)
        assert found == self.expected[prompt], (prompt[-30:], found, self.expected[prompt])

    # -- operations -----------------------------------------------------------------------------

    def begin(self):
        if len(self.engines) == MOST_ENGINES:
            self.engines.pop().close()
        self.engines.append(Llama(self.model, **SETTINGS))

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
        """Let an engine go: closed, dropped, or in a cycle, perhaps with its open stream."""
        llama = self.engine()
        self.engines.remove(llama)
        self.check(llama, self.random.choice(PROMPTS))  # so that it has a save to do
        how = self.random.randrange(4)
        if how == 0:
            llama.close()
        elif how == 1:
            Cycle(llama)
        elif how == 2:
            stream = llama.create_completion("And", max_tokens=3, temperature=0, stream=True)
            next(stream)
            Cycle((llama, stream))
            del stream
        del llama

    def replace(self):
        """Drop one in a cycle, and be found by the collector while another is made and asked."""
        self.drop()
        self.begin()
        self.check(self.engines[-1], self.random.choice(PROMPTS))

    def fork(self):
        """A child goes on with an engine, and ends in one of several ways."""
        llama, prompts = self.engine(), self.random.sample(PROMPTS, 2)
        how = self.random.randrange(3)
        pid = os.fork()
        if pid == 0:
            code = 1
            with contextlib.suppress(BaseException):
                signal.alarm(HANGS_AFTER_S - 5)
                for prompt in prompts:
                    self.check(llama, prompt)
                if how == 1:
                    self.engines.clear()
                    del llama
                    gc.collect()
                elif how == 2:
                    self.end()
                code = 0
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
        """Two engines work on threads, and a third one is garbage."""
        while len(self.engines) < 2:
            self.begin()
        Cycle(Llama(self.model, **SETTINGS))
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
        for thread in threads:
            thread.join()
        assert not failed, failed

    def look(self):
        status = self.suite.status()
        assert status["errors"] == {}, status["errors"]

    def evict(self):
        self.suite.evict(self.random.choice("ab"))

    def activate_anew(self):
        """With engines open, which the next activation leaves alone."""
        if self.random.random() < 0.5:
            self.drop()
        self.suite.deactivate()
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
        look: 1,
        evict: 1,
        activate_anew: 1,
    }

    def round(self, note):
        operation = self.random.choices(*zip(*self.OPERATIONS.items(), strict=True))[0]
        threshold = int(10 ** self.random.uniform(0.5, 3.5))
        note(f"{operation.__name__}, threshold {threshold}")
        gc.set_threshold(threshold, self.random.choice([1, 10]), self.random.choice([1, 10]))
        operation(self)


def texts(model):
    """What vanilla says to each prompt, with empty cells."""
    with contextlib.closing(Llama(model, **SETTINGS)) as llama:
        found = {}
        for prompt in PROMPTS:
            llama.reset()
            found[prompt] = answer(llama, prompt)
        return found


def main():
    first, n_seeds, n_rounds = map(int, sys.argv[1:4])
    folder, plugins, model = Path(sys.argv[4]), json.loads(sys.argv[5]), sys.argv[6]
    plugins["kv_chunks"]["store"] = str(folder / "kv")
    expected, doing = texts(model), ""
    for seed in range(first, first + n_seeds):
        life = Life(seed, {"on_error": "raise", "plugins": plugins}, model, expected)
        for i in range(n_rounds):

            def note(operation, i=i, seed=seed):
                nonlocal doing
                doing = f"seed {seed}, round {i}: {operation}"
                (folder / "operation").write_text(doing)
                faulthandler.dump_traceback_later(HANGS_AFTER_S, exit=True)

            try:
                life.round(note)
            except BaseException:
                traceback.print_exc()
                sys.exit(doing)
        note("end", n_rounds)
        alive = [weakref.ref(llama) for llama in life.engines]
        life.end()
        life.engines.clear()
        del life
        gc.collect()
        assert not any(ref() for ref in alive), f"seed {seed}: engines outlive their life"
    faulthandler.cancel_dump_traceback_later()
    sys.stdout.write("whole\n")


if __name__ == "__main__":
    main()

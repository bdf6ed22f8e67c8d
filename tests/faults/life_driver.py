"""Contexts that come and go at random in an app whose texts must stay those of vanilla.

    life_driver.py FIRST_SEED N_SEEDS N_ROUNDS FOLDER PLUGINS MODEL

A seed is one life of N_ROUNDS rounds. Each round changes the collector's threshold and performs
one operation: ask, abandon a stream, drop an engine in one of several ways, fork, take a signal
that drops an engine, take Ctrl-C, ask on two threads, change the memory budget, evict, or
activate anew. Where knn_lm mixes, texts must be those of knn_lm alone.
A failure is reported with its seed, round and operation. A crash or a hang leaves the last
operation in FOLDER/operation. At the end, the plugins' counters are printed as JSON.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import json
import sys
import traceback
import warnings
import weakref
from collections import Counter
from pathlib import Path

from app_life import (
    HANGS_AFTER_S,
    PROMPTS,
    SETTINGS,
    Life,
    answer,
)
from llama_cpp import Llama

from llmaas_plugins import activate
from llmaas_plugins.knn_lm.drafts.draft_model import DatastoreDraft

CHEAP = {1: 1.0, 2: 1.1, 4: 1.2, 8: 1.4}
"""Batch costs so low that drafts are proposed even on little evidence."""


def texts(model):
    """Return the answer to each prompt, computed with empty cells."""
    with contextlib.closing(Llama(model, **SETTINGS)) as llama:
        found = {}
        for prompt in PROMPTS:
            llama.reset()
            found[prompt] = answer(llama, prompt)
        return found


def live(life, n_rounds, note):
    """Run the rounds; assert that the engines end with the life."""
    for i in range(n_rounds):
        life.round(functools.partial(note, i))
    note(n_rounds, "end")
    life.stream()
    alive = [weakref.ref(llama) for llama in life.engines]
    life.end()
    life.engines.clear()
    gc.collect()
    assert not any(ref() for ref in alive), "engines outlive their life"


def main():
    warnings.simplefilter("ignore")  # of forks in a process with threads
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

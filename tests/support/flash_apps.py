"""An app in a process of its own, with or without a memory budget; tests supply its last lines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import fork_server

MIB = 1 << 20
SUPPORT = str(Path(__file__).parent)

APP = """
import json, sys
path, packs, script = sys.argv[1:]
from llama_cpp import Llama, llama_cpp
from llmaas_plugins import activate
from llmaas_plugins.machine import resident_bytes

MIB = 1 << 20
defaults = llama_cpp.llama_model_default_params
def unrepacked():
    params = defaults()
    params.use_extra_bufts = False
    return params

def app(budget=None, **table):
    if budget is None:
        if packs != "packed":
            llama_cpp.llama_model_default_params = unrepacked
        suite = None
    else:
        llama_cpp.llama_model_default_params = defaults
        table = {"memory_budget": budget, "arena": 8 * MIB} | table
        suite = activate({"on_error": "raise", "plugins": {"flash_weights": table}})
    return suite, Llama(path, n_ctx=256, n_batch=64, n_threads=1, n_threads_batch=1, verbose=False)

def generator(llama):
    llama.reset()
    return llama.generate(list(range(300, 340)), temp=0.0)

def tokens(llama, n=48):
    return [token for token, _ in zip(generator(llama), range(n))]

def streamed(suite):
    return suite.status()["plugins"]["flash_weights"]

def peak():
    line = next(x for x in open("/proc/self/status") if x.startswith("VmHWM"))
    return int(line.split()[1]) * 1024

exec(script)
"""


def run(path, script, *, is_packed=False, group=None, is_forked=False):
    """Run a script in a process of its own and return what it prints as JSON.

    A forked process starts sooner. But as it shares memory with the fork server, its memory tells
    little: it grows as the process uses code that others have loaded.
    """
    done = (fork_server if is_forked else subprocess).run(
        [sys.executable, "-c", APP, str(path), "packed" if is_packed else "plain", script],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        **({"preexec_fn": group.join} if group else {}),
        env=os.environ | {"GGML_NO_BACKTRACE": "1", "PYTHONPATH": SUPPORT},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)

"""kv_chunks keeps its budget by the kernel's count of memory, page cache included."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile

import pytest
from cgroups import file_bytes, memory_group

MIB = 1 << 20
# Independent of the budget: code, indexes, heaps of threads, 1 MiB of SQLite's log. Six runs took
# up to 6.0 MiB.
OVERHEAD = 7 * MIB
# "tolerance" reads attention: a layer's keys as floats, and the code for this.
TAP, TAP_OF_A_CELL = MIB, 1 << 10
N_CTX = 1024

# Contexts called in turn; their cells together are far larger than any budget below.
CHILD = """
import json, sys
from llama_cpp import Llama
from llmaas_plugins import activate

model, plugins, n_ctx, n_calls = json.loads(sys.argv[1])
with activate({"on_error": "raise", "plugins": plugins}) as suite:
    threads = {"n_threads": 1, "n_threads_batch": 1}
    llama = Llama(model, n_ctx=n_ctx, flash_attn=True, verbose=False, **threads)
    prompts = [[1, 300 + i] + [(7 * i + j) % 4000 + 50 for j in range(900)] for i in range(4)]
    for i in range(n_calls):
        for token in llama.generate(prompts[i % len(prompts)], temp=0.0):
            break
    status = suite.status()["plugins"]
    llama.close()
print(json.dumps(status))
"""


def run(model, plugins, n_calls=12, own_files=None):
    """Return the peak bytes of a process with these plugins, and their status.

    The process finds no digest of the model in the user's cache, and computes it.
    """
    job = json.dumps([str(model), plugins, N_CTX, n_calls])
    with memory_group() as group, tempfile.TemporaryDirectory() as cache:
        done = subprocess.run(
            [sys.executable, "-c", CHILD, job],
            stdout=subprocess.PIPE,
            check=True,
            preexec_fn=group.join,
            # a huge page would add 2 MiB by chance
            env={**os.environ, "NUMPY_MADVISE_HUGEPAGE": "0", "XDG_CACHE_HOME": cache},
        )
        if own_files is not None:
            shutil.rmtree(own_files)
        return group.peak - file_bytes(group), json.loads(done.stdout)


@pytest.fixture(scope="module")
def vanilla_peak(packaged_model):
    return run(packaged_model, {}, 2)[0]


def overhead(settings):
    """Return the bytes needed beside the budget."""
    n_cells = N_CTX + settings.get("parked_tokens", 0)
    is_tapped = settings["codec"] == "tolerance"
    return OVERHEAD + is_tapped * (TAP + n_cells * TAP_OF_A_CELL)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("budget", "settings"),
    [
        (2 * MIB, {"codec": "lossless"}),
        (8 * MIB, {"codec": "int8"}),
        (2 * MIB, {"codec": "tolerance"}),
        (8 * MIB, {"codec": "tolerance", "parked_tokens": N_CTX}),
    ],
)
def test_peak_memory(packaged_model, tmp_path, vanilla_peak, budget, settings):
    store = tmp_path / "kv"
    table = settings | {"ram_budget": budget, "store": str(store)}
    peak, status = run(packaged_model, {"kv_chunks": table}, own_files=store)
    report = status["kv_chunks"]
    assert report["restored_tokens"] > 5000
    assert report["ram_reclaimed"] > 0
    assert ("parks" in report) == ("parked_tokens" in settings)
    assert peak - vanilla_peak <= budget + overhead(settings)

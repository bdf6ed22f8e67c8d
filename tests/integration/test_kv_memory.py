"""Memory as the kernel counts it, page cache included: the budget holds."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from cgroups import memory_group

MIB = 1 << 20
OVERHEAD = 6 * MIB  # indexes, SQLite, four loader threads: whatever the budget

# Contexts called in turn; their cells together are far larger than any budget below.
CHILD = """
import json, sys
from llama_cpp import Llama
from llmaas_plugins import activate

model, plugins, n_calls = json.loads(sys.argv[1])
with activate({"on_error": "raise", "plugins": plugins}) as suite:
    llama = Llama(model, n_ctx=1024, n_threads=1, n_threads_batch=1, flash_attn=True, verbose=False)
    prompts = [[1, 300 + i] + [(7 * i + j) % 4000 + 50 for j in range(900)] for i in range(8)]
    for i in range(n_calls):
        for token in llama.generate(prompts[i % len(prompts)], temp=0.0):
            break
    status = suite.status()["plugins"]
    llama.close()
print(json.dumps(status))
"""


def run(model, plugins, n_calls=24):
    """Peak bytes of a process with these plugins, and their status."""
    job = json.dumps([str(model), plugins, n_calls])
    with memory_group() as group:
        done = subprocess.run(
            [sys.executable, "-c", CHILD, job],
            stdout=subprocess.PIPE,
            check=True,
            preexec_fn=group.join,
        )
        return group.peak, json.loads(done.stdout)


@pytest.fixture(scope="module")
def vanilla_peak(reference_model):
    run(reference_model, {}, 1)  # whoever reads a file first is charged for its pages
    return run(reference_model, {})[0]


@pytest.mark.parametrize(("budget", "codec"), [(2 * MIB, "lossless"), (8 * MIB, "int8")])
def test_peak_memory(reference_model, tmp_path, vanilla_peak, budget, codec):
    table = {"codec": codec, "ram_budget": budget, "store": str(tmp_path)}
    peak, status = run(reference_model, {"kv_chunks": table})
    report = status["kv_chunks"]
    assert report["restored_tokens"] > 10_000
    assert report["ram_reclaimed"] > 0
    assert peak - vanilla_peak <= budget + OVERHEAD

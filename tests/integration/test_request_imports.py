"""Requests import nothing: a child that is forked meanwhile would wait for the import forever."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

SCRIPT = """
import json, sys, threading
import llama_cpp
from llmaas_plugins import activate

class Finder:
    def find_spec(self, name, path=None, target=None):
        if threading.current_thread() is threading.main_thread():
            found.append(name)

found, (path, plugins) = [], sys.argv[1:]
with activate({"on_error": "raise", "plugins": json.loads(plugins)}):
    llama = llama_cpp.Llama(path, n_ctx=256, n_threads=1, n_threads_batch=1, verbose=False)
    sys.meta_path.insert(0, Finder())
    for _ in range(2):
        for _ in llama.create_completion("To be", max_tokens=8, stream=True): pass
        llama.create_chat_completion([{"role": "user", "content": "Hello"}], max_tokens=4)
    sys.meta_path.pop(0)
    llama.close()
print(json.dumps(found))
"""


@pytest.mark.parametrize(
    "plugins",
    [
        {"kv_chunks": {}, "elastic": {}},
        {"flash_weights": {"memory_budget": "60%"}},
        {"knn_lm": {"drafts": True, "mix": False}},
    ],
    ids=" ".join,
)
def test_no_module_is_imported_by_requests(light_model, tmp_path, plugins):
    """Jobs behind a request may import, because forks wait for them."""
    if "kv_chunks" in plugins:
        plugins = plugins | {"kv_chunks": {"store": str(tmp_path)}}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, light_model, json.dumps(plugins)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert json.loads(done.stdout.splitlines()[-1]) == []

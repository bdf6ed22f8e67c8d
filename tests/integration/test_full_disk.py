"""Contexts can be deleted while their disk is full to the last block."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

INSIDE = ["unshare", "--map-root-user", "--mount"]
DISK = 'mount -t tmpfs -o size="$1" tmpfs "$2" && shift 2 && exec "$@"'
SCRIPT = """
import contextlib, json, sys
from pathlib import Path
from llama_cpp import Llama
from llmaas_hooks import serving_context
from llmaas_plugins import activate
from llmaas_plugins.reference_model import reference_model_path
from llmaas_plugins.service import LLMService, ServiceConfig

folder = Path(sys.argv[1])
with_kv = sys.argv[2] == "with KV"
SECRETS = ["The zebra's passphrase is quartz-7741.", "Her name is Ottoline Vantongeren."]
OPTIONS = {"temperature": 0.0, "max_tokens": 4}

def fill():
    # to the last block, of all sizes
    with (folder / "others").open("ab", buffering=0) as file:
        for n_bytes in (1 << 16, 1 << 12, 1):
            with contextlib.suppress(OSError):
                while file.write(bytes(n_bytes)):
                    pass

def is_anywhere(secret):
    files = [path for path in folder.rglob("*") if path.is_file()]
    return any(secret.encode() in path.read_bytes() for path in files)

plugins = {"kv_chunks": {"codec": "lossless", "store": str(folder / "kv")}} if with_kv else {}
with activate({"on_error": "raise", "plugins": plugins}) as suite:
    settings = {"n_ctx": 512, "n_threads": 1, "flash_attn": True, "verbose": False}
    llama = Llama(str(reference_model_path()), **settings)
    with LLMService(llama, ServiceConfig(state_dir=folder / "state")) as service:
        app = service.bind("mail")
        long = app.new_context(SECRETS[0] + " x" * 100_000)
        called, kept = app.new_context(), app.new_context()
        called.call(SECRETS[1], **OPTIONS)
        kept.call("How is the weather in the mountains today, and in the valley?", **OPTIONS)
        if with_kv:
            with serving_context("alone", "mail"):
                next(llama.generate(list(range(300, 364)), temp=0.0))
            suite.settle()
            suite.plugin("kv_chunks")._store.flush()
        found = []
        for secret, context in zip(SECRETS, (long, called)):
            assert is_anywhere(secret)
            fill()
            try:
                app.new_context("y" * 100_000)
                found.append("there was room")
            except OSError as error:
                found.append("is full" in str(error))
            context.delete()
            found.append(is_anywhere(secret))
        found.append([one.id for one in app.contexts()] == [kept.id])
        if with_kv:
            fill()
            found.append(suite.evict("alone") > 0)
    llama.close()
(folder / "others").unlink()
if with_kv:
    with activate({"plugins": plugins}) as suite:
        suite.evict("")  # opens the store
        found.append(list(suite.plugin("kv_chunks")._store.tree.contexts()) == [kept.id])
print(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.parametrize("kv", ["with KV", "without"])
def test_contexts_are_deleted_on_a_full_disk(tmp_path, kv):
    if subprocess.run([*INSIDE, "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs a file system of its own: allow user namespaces")
    command = [*INSIDE, "sh", "-c", DISK, "sh", "8m", str(tmp_path)]
    done = subprocess.run(
        [*command, sys.executable, "-c", SCRIPT, str(tmp_path), kv],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=os.environ | {"GGML_NO_BACKTRACE": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    more = [True] * 2 if kv == "with KV" else []
    assert json.loads(done.stdout.splitlines()[-1]) == [True, False, True, False, True, *more]

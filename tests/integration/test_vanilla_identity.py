"""With nothing enabled, everything an app can see is vanilla's to the byte.

``python test_vanilla_identity.py MODEL`` prints a digest of each compared result.
"""

from __future__ import annotations

import ctypes
import hashlib
import inspect
import json
import os
import subprocess
import sys
import warnings

import llama_cpp
import numpy as np
import pytest
from llama_cpp import Llama

from llmaas_plugins import activate, without

PROMPT = "User: Where is the station?\nAssistant:"
SETTINGS = {"n_ctx": 256, "n_threads": 1, "n_threads_batch": 1, "seed": 7, "verbose": False}


def snapshot(model):
    """Return digests, by name, of an app's results from a fresh engine and from a second one."""
    found = {}
    llama = Llama(str(model), **SETTINGS)
    tokens = llama.tokenize(PROMPT.encode())
    found["params"] = bytes(llama.context_params)
    found["sizes"] = (llama.n_ctx(), llama_cpp.llama_n_seq_max(llama.ctx))
    for name, sampling in {"greedy": {"temp": 0.0}, "sampled": {"temp": 0.9, "top_k": 50}}.items():
        found[f"{name} tokens"] = take(llama.generate(tokens, **sampling), 24)
        found[f"{name} state"] = states(llama)
        found[f"{name} state size"] = old_state_size(llama)
    saved = llama.save_state()
    found["saved"] = (digest(saved.llama_state), saved.llama_state_size, saved.n_tokens)
    found["saved tokens"] = saved.input_ids[: saved.n_tokens].tobytes()
    found["after saving"] = take(llama.generate([*tokens, 400], temp=0.0), 8)
    llama.load_state(saved)
    found["loaded state"] = states(llama)
    found["after loading"] = take(llama.generate([*tokens, 400], temp=0.0), 8)
    found["completion"] = [without_clock(llama(PROMPT, max_tokens=16))]
    found["chunks"] = [without_clock(c) for c in llama(PROMPT, max_tokens=16, stream=True)]
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello"}]
    chat = llama.create_chat_completion(messages, max_tokens=16, temperature=0.0)
    found["chat"] = [without_clock(chat)]
    found["last state"] = states(llama)
    llama.close()
    llama = Llama(str(model), **SETTINGS, logits_all=True, flash_attn=True)
    llama.eval(tokens)
    found["logits"] = digest(np.array(llama.scores[: len(tokens)]))
    logprobs = llama.create_completion(PROMPT, max_tokens=8, temperature=0.0, logprobs=3)
    found["logprobs"] = [without_clock(logprobs)]
    found["shifted"] = (llama._ctx.kv_cache_seq_rm(0, 4, 8), *states(llama))
    llama.close()
    return {name: digest(repr(value).encode()) for name, value in found.items()}


def digest(content):
    return hashlib.sha256(content).hexdigest()


def old_state_size(llama):
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        return llama_cpp.llama_get_state_size(llama.ctx)


def take(stream, n):
    tokens = [next(stream) for _ in range(n)]
    stream.close()
    return tokens


def states(llama):
    """Return digests of the whole state, and of that of sequence 0."""
    whole = (ctypes.c_uint8 * llama_cpp.llama_state_get_size(llama.ctx))()
    sequence = (ctypes.c_uint8 * llama_cpp.llama_state_seq_get_size(llama.ctx, 0))()
    assert llama_cpp.llama_state_get_data(llama.ctx, whole, len(whole)) == len(whole)
    assert llama_cpp.llama_state_seq_get_data(llama.ctx, sequence, len(sequence), 0) > 0
    return digest(whole), digest(sequence)


def without_clock(reply):
    return {key: value for key, value in reply.items() if key not in ("id", "created")}


@pytest.fixture(scope="module")
def vanilla(reference_model):
    return snapshot(reference_model)


def test_vanilla_repeats_itself(vanilla, reference_model):
    assert snapshot(reference_model) == vanilla
    assert len(set(vanilla.values())) > len(vanilla) / 2


def test_active_with_nothing_enabled(vanilla, reference_model):
    with activate({}):
        assert snapshot(reference_model) == vanilla
    assert snapshot(reference_model) == vanilla  # and afterwards


def test_switched_off_plugins_count_as_nothing(vanilla, reference_model, tmp_path):
    off = {"enabled": False, "store": str(tmp_path / "kv")}
    with activate({"plugins": {"kv_chunks": off}}):
        assert snapshot(reference_model) == vanilla
    assert list(tmp_path.iterdir()) == []


def test_after_a_plugin_was_active(vanilla, reference_model, tmp_path):
    with activate({"plugins": {"kv_chunks": {"store": str(tmp_path / "kv")}}}):
        Llama(str(reference_model), **SETTINGS).close()
    assert snapshot(reference_model) == vanilla


@pytest.fixture
def store(reference_model, tmp_path):
    """Return the directory of a datastore for knn_lm."""
    from datastores import stored  # this file is a script, too

    stored(reference_model).write(tmp_path / "knn")
    return tmp_path / "knn"


@pytest.mark.parametrize(
    "settings", [None, {"alpha": 0.0}, {"skip_above": 0.0}], ids=["no datastore", "alpha", "sure"]
)
def test_knn_lm_with_nothing_to_mix(vanilla, reference_model, store, settings):
    table = {"store": str(store if settings else store / "empty"), **(settings or {})}
    with activate({"on_error": "raise", "plugins": {"knn_lm": table}}) as suite:
        assert snapshot(reference_model) == vanilla
        report = suite.status()["plugins"]["knn_lm"]
        assert (report["pairs"] is None) == (settings is None) == bool(report["left_alone"])


def test_requests_without_knn_lm(vanilla, reference_model, store):
    with activate({"on_error": "raise", "plugins": {"knn_lm": {"store": str(store)}}}):
        assert snapshot(reference_model) != vanilla
        with without("knn_lm"):
            assert snapshot(reference_model) == vanilla


def test_an_engine_that_lives_through_an_activation(make_llama):
    untouched, through = make_llama(), make_llama()
    tokens = list(range(300, 330))

    def step(llama):
        return take(llama.generate(tokens, temp=0.9), 8), states(llama)

    steps = [step(untouched) for _ in range(3)]
    found = [step(through)]
    with activate({}):
        found.append(step(through))
    found.append(step(through))
    assert found == steps


@pytest.mark.slow
def test_llmaas_run_without_a_configuration(vanilla, reference_model, tmp_path):
    environ = os.environ | {"LLMAAS_PLUGINS": ""}
    llmaas = [sys.executable, "-m", "llmaas_plugins.cli.main"]
    done = subprocess.run(
        [*llmaas, "run", __file__, reference_model],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == {**vanilla, "patched": True}


def targets():
    from llmaas_patches.patcher import resolve
    from llmaas_patches.table import PATCHES

    names = [target for p in PATCHES if p.applies for target in (p.target, *p.also)]
    return {name: inspect.getattr_static(*resolve(name)) for name in names}


def test_revert_puts_back_the_very_objects():
    before = targets()
    for _ in range(2):
        with activate({}):
            during = targets()
        assert all(during[name] is not before[name] for name in before)
        after = targets()
        assert all(after[name] is before[name] for name in before)


if __name__ == "__main__":
    from llmaas_plugins import active_suite

    patched = active_suite() is not None
    json.dump({**snapshot(sys.argv[1]), "patched": patched}, sys.stdout)

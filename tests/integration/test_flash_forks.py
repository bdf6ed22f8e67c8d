"""flash_weights in forked children: both processes go on with weights that one of them opened."""

from __future__ import annotations

import pytest
from flash_apps import run
from gguf import GGMLQuantizationType

from llmaas_eval.models import Shape, write_random_model

SHAPE = Shape(n_layer=4, n_embd=256, n_head=4, n_head_kv=2, n_ff=4096, n_ctx=256)
"""15 MB of weights in Q8_0."""

PRELUDE = """
import os, signal
signal.alarm(60)  # a process that hangs ends
def in_child(work):
    pid = os.fork()
    if pid:
        return pid
    try:
        signal.alarm(60)
        os._exit(0 if work() else 3)
    finally:
        os._exit(4)
def is_well(pid):
    return os.waitpid(pid, 0)[1] == 0
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("forks") / "model.gguf"
    return write_random_model(path, SHAPE, GGMLQuantizationType.Q8_0)


def test_parent_and_children_say_what_the_parent_said(model):
    """Forks come between tokens too, while the next ones' weights are read ahead."""
    script = """
suite, llama = app(resident_bytes() + 40 * MIB, arena=2 * MIB)
expected = tokens(llama, 16)
read_before = streamed(suite)["models"][0]["read_bytes"]
def same():
    return tokens(llama, 16) == expected
def grandchild_too():
    pid = in_child(same)
    return same() and is_well(pid)
first = in_child(grandchild_too)
parent = [same()]
middle = generator(llama)
said = [next(middle) for _ in range(5)]
def rest():
    return said + [token for token, _ in zip(middle, range(11))] == expected
second = in_child(rest)
parent.append(rest())
is_streamed = streamed(suite)["models"][0]["read_bytes"] > read_before
print(json.dumps([is_streamed, *parent, is_well(first), is_well(second)]))
"""
    assert run(model, PRELUDE + script) == [True] * 5


def test_a_child_of_a_parent_that_computes_is_told_so(model):
    """Contexts of the model that computes fail in the child, and nothing hangs. Others go on."""
    script = """
import threading
suite, llama = app(resident_bytes() + 80 * MIB, arena=2 * MIB)
other = Llama(path, n_ctx=256, n_batch=64, n_threads=1, n_threads_batch=1, verbose=False)
params = llama_cpp.llama_context_default_params()
params.n_ctx, params.n_threads, params.n_threads_batch = 256, 1, 1
beside = llama_cpp.llama_init_from_model(other._model.model, params)  # of the same model
expected = tokens(llama, 8)
busy, ends = threading.Event(), threading.Event()
def pause(data):
    busy.set()
    ends.wait(50)
    return False
callback = llama_cpp.ggml_abort_callback(pause)
llama_cpp.llama_set_abort_callback(other._ctx.ctx, callback, None)
thread = threading.Thread(target=lambda: other.eval([5, 6, 7]))
def decode(ctx):
    token = (llama_cpp.llama_token * 1)(9)
    return llama_cpp.llama_decode(ctx, llama_cpp.llama_batch_get_one(token, 1))
def is_told():
    return [decode(other._ctx.ctx), decode(beside), tokens(llama, 8) == expected] == [-3, -3, True]
thread.start()
busy.wait()
child = is_well(in_child(is_told))
ends.set()
thread.join()
print(json.dumps([child, decode(beside), tokens(llama, 8) == expected]))
"""
    assert run(model, PRELUDE + script) == [True, 0, True]

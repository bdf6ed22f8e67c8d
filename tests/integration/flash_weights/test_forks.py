"""flash_weights in forked children: both processes continue with weights that one opened."""

from __future__ import annotations

from flash_apps import run

PRELUDE = """
import signal
signal.alarm(60)  # a process that hangs ends
from forking import begin, exit_code
"""

COMPUTING = f"""{PRELUDE}
import threading
suite, llama = app(resident_bytes() + 80 * MIB, arena=2 * MIB)
other = Llama(path, n_ctx=256, n_batch=64, n_threads=1, n_threads_batch=1, verbose=False)
params = llama_cpp.llama_context_default_params()
params.n_ctx, params.n_batch, params.n_threads, params.n_threads_batch = 256, 1, 1, 1
beside = llama_cpp.llama_init_from_model(other._model.model, params)  # of the same model
expected = tokens(llama, 8)
busy, ends = threading.Event(), threading.Event()
def pause(data):
    busy.set()
    ends.wait(50)
    return False
callback = llama_cpp.ggml_abort_callback(pause)
thread = threading.Thread(target=lambda: other.eval([5, 6, 7]))
def decode(ctx):
    token = (llama_cpp.llama_token * 1)(9)
    return llama_cpp.llama_decode(ctx, llama_cpp.llama_batch_get_one(token, 1))
def while_another_computes(work):
    llama_cpp.llama_set_abort_callback(other._ctx.ctx, callback, None)
    thread.start()
    busy.wait()
    child = exit_code(begin(work, 60))
    ends.set()
    thread.join()
    return child
"""


def test_parent_and_children_say_what_the_parent_said(small):
    """Forks also happen between tokens, while weights are read ahead."""
    script = """
suite, llama = app(resident_bytes() + 40 * MIB, arena=2 * MIB)
expected = tokens(llama, 16)
read_before = streamed(suite)["models"][0]["read_bytes"]
def same():
    assert tokens(llama, 16) == expected
def grandchild_too():
    pid = begin(same, 60)
    same()
    assert exit_code(pid) == 0
first = begin(grandchild_too, 60)
same()
middle = generator(llama)
said = [next(middle) for _ in range(5)]
def rest():
    assert said + [token for token, _ in zip(middle, range(11))] == expected
second = begin(rest, 60)
rest()
is_streamed = streamed(suite)["models"][0]["read_bytes"] > read_before
print(json.dumps([is_streamed, exit_code(first), exit_code(second)]))
"""
    assert run(small, PRELUDE + script, is_forked=True) == [True, 0, 0]


def test_a_child_of_a_parent_that_computes_is_told_so(small):
    """In the child, contexts of the computing model fail without hanging; other models work."""
    script = """
def is_told():
    assert [decode(other._ctx.ctx), decode(beside), tokens(llama, 8) == expected] == [-3, -3, True]
child = while_another_computes(is_told)
print(json.dumps([child, decode(beside), tokens(llama, 8) == expected]))
"""
    assert run(small, COMPUTING + script, is_forked=True) == [0, 0, True]


def test_a_child_makes_a_context_of_a_model_that_its_parent_computes_with(small):
    script = """
def make_one():
    made = llama_cpp.llama_init_from_model(other._model.model, params)
    assert decode(made) == -3
    llama_cpp.llama_free(made)
print(json.dumps(while_another_computes(make_one)))
"""
    assert run(small, COMPUTING + script, is_forked=True) == 0


def test_a_child_leaves_alone_weights_that_its_parent_computes_with(small):
    """A child keeps weights that may be half changed; other models give memory back as usual."""
    script = """
from budgets import squeeze
def kept():
    return [found["kept_bytes"] for found in streamed(suite)["models"]]
def give_back():
    before = kept()
    squeeze(suite.plugin("flash_weights"))
    assert before[1] == kept()[1] > 0
    assert before[0] > kept()[0]
decode(beside), decode(other._ctx.ctx)  # the memory that they compute in is taken
print(json.dumps(while_another_computes(give_back)))
"""
    assert run(small, COMPUTING + script, is_forked=True) == 0


def test_a_child_deactivates_while_its_parent_loads_a_model(small):
    """Registration waits for loads, but not for those of threads that a child does not have."""
    script = """
import threading
suite, llama = app(resident_bytes() + 80 * MIB)
busy, ends = threading.Event(), threading.Event()
def pause(progress, data):
    busy.set()
    return ends.wait(50)
params = llama_cpp.llama_model_default_params()
params.progress_callback = llama_cpp.llama_progress_callback(pause)
load = lambda: llama_cpp.llama_model_load_from_file(path.encode(), params)
thread = threading.Thread(target=load)
thread.start()
busy.wait()
child = exit_code(begin(suite.deactivate, 60))
ends.set()
thread.join()
print(json.dumps(child))
"""
    assert run(small, PRELUDE + script, is_forked=True) == 0

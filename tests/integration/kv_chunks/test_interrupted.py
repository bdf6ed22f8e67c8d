"""Ctrl-C at the worst places of requests and of the suite's end."""

from __future__ import annotations

import llama_cpp
import numpy as np
import pytest
from parks import Parks
from switching import OTHER, PROMPT, ask

from llmaas_hooks import hookimpl
from llmaas_hooks.request_scope import serving_context
from llmaas_patches.engine import LlamaEngine
from llmaas_patches.host import Host

OWN = [11, 12, 13]


class Interrupts:
    """Replacement of a method that interrupts its next call, or the call's end.

    Attributes:
        is_next: Whether the next call is interrupted.
    """

    def __init__(self, monkeypatch, owner, name, *, is_late=False):
        original = getattr(owner, name)
        self.is_next = False

        def method(this, *args):
            is_now, self.is_next = self.is_next, False
            if is_now and not is_late:
                raise KeyboardInterrupt
            found = original(this, *args)
            if is_now:
                raise KeyboardInterrupt
            return found

        monkeypatch.setattr(owner, name, method)


class Ear:
    """Listener to what each request of an app reused."""

    def __init__(self):
        self.reused = {}

    @hookimpl
    def llmaas_request_end(self, request, stats):
        self.reused[request.app] = stats.n_reused


def row(llama):
    found = llama_cpp.llama_get_logits_ith(llama.ctx, -1)
    return np.ctypeslib.as_array(found, shape=(llama.n_vocab(),)).copy()


def in_sequences(llama):
    memory, n = llama_cpp.llama_get_memory(llama.ctx), int(llama_cpp.llama_n_seq_max(llama.ctx))
    return [i for i in range(1, n) if llama_cpp.llama_memory_seq_pos_max(memory, i) >= 0]


def test_no_app_reuses_the_cells_of_another_ones_interrupted_request(make, patched, monkeypatch):
    interrupts = Interrupts(monkeypatch, LlamaEngine, "first_output")
    ear = Ear()

    class OnlyForB(Parks):
        @hookimpl
        def llmaas_kv_restore(self, request):
            taken = super().llmaas_kv_restore(request)
            return taken if request.app == "B" else None

    patched(parks=OnlyForB(), ear=ear)
    llama = make()
    with serving_context(None, "B"):
        ask(llama, OTHER, 3)
    with serving_context(None, "A"):
        ask(llama, PROMPT, 3)
    with serving_context(None, "B"):
        interrupts.is_next = True
        with pytest.raises(KeyboardInterrupt):
            ask(llama, OTHER, 3)
    with serving_context(None, "A"):
        ask(llama, OTHER, 1)
    assert ear.reused["A"] == 0


def test_a_restore_that_is_cut_off_twice_gives_the_app_no_cells(make, patched, monkeypatch):
    interrupts = Interrupts(monkeypatch, LlamaEngine, "drop_half_restored")

    class CutOff(Parks):
        is_next = False

        @hookimpl
        def llmaas_kv_restore(self, request):
            found = super().llmaas_kv_restore(request)
            if self.is_next:
                interrupts.is_next = True
                raise KeyboardInterrupt
            return found

    vanilla = make()
    plugin = CutOff()
    patched(parks=plugin)
    llama = make()
    ask(llama, OTHER, 3)
    ask(llama, PROMPT, 3)
    plugin.is_next = True
    with pytest.raises(KeyboardInterrupt):
        ask(llama, OTHER, 3)
    plugin.is_next = False
    records = llama._input_ids.tolist()
    llama.eval(OWN)
    vanilla.reset()
    vanilla.eval([*records, *OWN])
    assert np.abs(row(llama) - row(vanilla)).max() < 1e-2 * row(vanilla).std()


def test_what_the_app_evaluates_after_a_restore_that_never_ended_stays(make, patched, monkeypatch):
    interrupts = Interrupts(monkeypatch, LlamaEngine, "begin_restore", is_late=True)
    vanilla = make()
    patched(parks=Parks())
    llama = make()
    ask(llama, PROMPT, 3)
    interrupts.is_next = True
    with pytest.raises(KeyboardInterrupt):
        ask(llama, OTHER, 3)
    answers = []
    for one in (llama, vanilla):
        one.reset()
        one.eval(OTHER)
        tokens = one.generate(OWN, temp=0.0, reset=False)
        answers.append([next(tokens) for _ in range(3)])
        tokens.close()
        assert one.n_tokens == len(OTHER) + len(OWN) + 2
    assert answers[0] == answers[1]


@pytest.mark.parametrize("where", ["end_paused", "give_up_parked"])
def test_ctrl_c_in_the_suites_end_leaves_no_parked_cells(make, patched, monkeypatch, where):
    installed = patched(parks=Parks())
    llama = make()
    ask(llama, PROMPT, 3)
    ask(llama, OTHER, 3)
    Interrupts(monkeypatch, Host, where).is_next = True
    with pytest.raises(KeyboardInterrupt):
        installed.revert()
    assert in_sequences(llama) == []


@pytest.mark.parametrize(("name", "is_late"), [("begin", True), ("end", False)])
def test_a_request_that_is_cut_off_ends_with_the_apps_next_batch(
    make, patched, monkeypatch, name, is_late
):
    ear = Ear()
    installed = patched(ear=ear)
    llama = make()
    tracker = installed._host.engine(llama)._tracker
    generator = llama.generate(PROMPT, temp=0.0)
    interrupts = Interrupts(monkeypatch, LlamaEngine, name, is_late=is_late)
    if name == "end":
        next(generator)
    interrupts.is_next = True
    with pytest.raises(KeyboardInterrupt):
        next(generator) if name == "begin" else generator.throw(ValueError)
    assert ear.reused == {}
    llama.eval(OWN)
    assert tracker.due == []
    assert name == "begin" or None in ear.reused


def test_cells_that_llama_dropped_and_did_not_record(make, patched, monkeypatch):
    """``Llama.generate`` keeps the common prefix's cells, and records their number afterwards."""
    patched(parks=Parks())
    llama, vanilla = make(), make()
    ask(llama, PROMPT, 3)
    real = llama._ctx.kv_cache_seq_rm

    def removed(*args):
        assert real(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(llama._ctx, "kv_cache_seq_rm", removed)
        with pytest.raises(KeyboardInterrupt):
            ask(llama, [*PROMPT[:10], *OTHER], 3)
    (tokens, rows), (expected, expected_rows) = ask(llama, PROMPT, 3), ask(vanilla, PROMPT, 3)
    assert tokens == expected
    assert np.abs(rows - expected_rows).max() < 1e-3


def test_a_request_that_fails_before_it_begins_changes_no_cell(make, patched):
    patched(parks=Parks())
    llama, vanilla = make(), make()
    for one in (llama, vanilla):
        ask(one, PROMPT, 3)
    with pytest.raises(TypeError):
        next(llama.generate([*PROMPT[:40], *OWN], temp=None))
    found, expected = (
        [*zip(range(4), one.generate(OWN, reset=False, temp=0.0), strict=False)]
        for one in (llama, vanilla)
    )
    assert found == expected


def test_the_suites_end_waits_for_no_running_request(make, patched):
    """The request may hold a lock that deferred work of another one needs."""
    llama = make()
    jobs = []

    class Restoring(Parks):
        @hookimpl
        def llmaas_kv_restore(self, request):
            host.end_paused()
            jobs.extend(host.background.pending)

    installed = patched(parks=Restoring())
    host = installed._host
    ask(llama, PROMPT, 3)
    assert jobs == []

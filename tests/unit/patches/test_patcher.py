"""Patches are applied all or none, and removed exactly."""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from types import ModuleType, SimpleNamespace

import llama_cpp
import pytest
from llama_cpp import llama_cpp as bindings

from llmaas_hooks import HookManager, IncompatibleError
from llmaas_patches import compat, install
from llmaas_patches.patcher import Applied, Patch, check, resolve
from llmaas_patches.table import PATCHES


def wrap(host, original):
    @functools.wraps(original)
    def wrapper(*args):
        return ("wrapped", original(*args))

    return wrapper


def apply(patches, host):
    applied = Applied()
    applied.apply(patches, host)
    return applied


@pytest.fixture
def engine(monkeypatch):
    """Return a small substitute for llama_cpp: a function under two names, and a method."""
    module, second = ModuleType("small_engine"), ModuleType("small_engine_star")

    def decode(ctx, batch):
        return ctx + batch

    class Llama:
        def generate(self, tokens):
            return tokens

    module.decode = second.decode = decode
    module.Llama = Llama
    monkeypatch.setitem(sys.modules, "small_engine", module)
    monkeypatch.setitem(sys.modules, "small_engine_star", second)
    return SimpleNamespace(module=module, second=second, decode=decode, Llama=Llama)


DECODE = Patch("small_engine:decode", ("ctx", "batch"), wrap, also=("small_engine_star:decode",))
GENERATE = Patch("small_engine:Llama.generate", ("self", "tokens"), wrap)


APPLIED = [patch for patch in PATCHES if patch.applies]
"""Patches of the installed release."""


def originals():
    owners = [resolve(target) for patch in APPLIED for target in (patch.target, *patch.also)]
    return {(owner, name): inspect.getattr_static(owner, name) for owner, name in owners}


def test_apply_and_revert_both_names(engine):
    generate = engine.Llama.__dict__["generate"]
    applied = apply((DECODE, GENERATE), None)
    assert engine.module.decode(1, 2) == engine.second.decode(1, 2) == ("wrapped", 3)
    assert engine.Llama().generate("t") == ("wrapped", "t")
    assert applied.targets() == [
        "small_engine.decode",
        "small_engine_star.decode",
        "Llama.generate",
    ]
    applied.revert()
    assert engine.module.decode is engine.second.decode is engine.decode
    assert engine.Llama.__dict__["generate"] is generate
    assert applied.targets() == []


def test_a_name_that_an_app_imported_before_is_patched_too(engine, monkeypatch):
    app = ModuleType("small_app")
    app.evaluate = engine.decode
    monkeypatch.setitem(sys.modules, "small_app", app)
    applied = apply((DECODE,), None)
    assert app.evaluate(1, 2) == ("wrapped", 3)
    assert "small_app.evaluate" in applied.targets()
    applied.revert()
    assert app.evaluate is engine.decode


def test_revert_is_idempotent(engine):
    applied = apply((DECODE,), None)
    applied.revert()
    again = apply((DECODE,), None)
    applied.revert()  # must not remove the second set
    assert engine.module.decode(1, 2) == ("wrapped", 3)
    again.revert()
    assert engine.module.decode is engine.decode


def test_layers_come_off_last_first(engine):
    first, second = apply((DECODE,), None), apply((DECODE,), None)
    assert engine.module.decode(1, 2) == ("wrapped", ("wrapped", 3))
    second.revert()
    assert engine.module.decode(1, 2) == ("wrapped", 3)
    first.revert()
    assert engine.module.decode is engine.decode


@pytest.mark.parametrize(
    ("drifted", "message"),
    [
        (Patch("small_engine:nothing", (), wrap), "small_engine:nothing is missing"),
        (Patch("small_engine:Nobody.generate", (), wrap), "is missing"),
        (Patch("small_engine_no:decode", (), wrap), "is missing"),
        (Patch("small_engine:decode", ("ctx", "b"), wrap), "has parameters ('ctx', 'batch')"),
        (Patch("small_engine:number", ("ctx",), wrap), "has no signature"),
        (
            Patch("small_engine:decode", ("ctx",), wrap, also=("small_engine_star:other",)),
            "small_engine_star:other is not the same object",
        ),
    ],
)
def test_drift_is_refused_and_nothing_is_patched(engine, drifted, message):
    engine.module.number = 3
    engine.second.other = len
    with pytest.raises(IncompatibleError) as caught:
        apply((DECODE, drifted, GENERATE), None)
    assert message in str(caught.value)
    assert "llmaas doctor" in str(caught.value)
    assert engine.module.decode is engine.second.decode is engine.decode


def test_failing_wrap_leaves_nothing_half_patched(engine):
    def explode(host, original):
        raise MemoryError

    with pytest.raises(MemoryError):
        apply((DECODE, Patch("small_engine:Llama.generate", ("self",), explode)), None)
    assert engine.module.decode is engine.second.decode is engine.decode


def test_foreign_patch_on_top_stays_and_works(engine, caplog):
    applied = apply((DECODE,), None)
    ours = engine.module.decode
    engine.module.decode = foreign = lambda ctx, batch: ("foreign", ours(ctx, batch))
    applied.revert()
    assert engine.module.decode is foreign
    assert engine.module.decode(1, 2) == ("foreign", ("wrapped", 3))
    assert engine.second.decode is engine.decode
    assert "small_engine.decode was patched again by other code" in caplog.text


def test_a_name_that_is_gone_is_left_alone(engine):
    applied = apply((DECODE,), None)
    del engine.second.decode
    applied.revert()
    assert engine.module.decode is engine.decode


def test_check_reports_and_changes_nothing(engine):
    missing = Patch("small_engine:nothing", (), wrap)
    (good, bad) = check((DECODE, missing))
    assert good == ("small_engine:decode", None)
    assert bad[0] == "small_engine:nothing"
    assert "is missing" in bad[1]
    assert engine.module.decode is engine.decode


@pytest.fixture
def hurried():
    """Make threads switch fifty times as often."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(before / 50)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("hurried")
@pytest.mark.slow
def test_threads_may_call_while_patches_come_and_go(engine):
    stop, seen = threading.Event(), set()

    def call():
        while not stop.is_set():
            seen.add(engine.module.decode(1, 2))

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(20):
        apply((DECODE, GENERATE), None).revert()
    stop.set()
    for thread in threads:
        thread.join()
    assert seen <= {3, ("wrapped", 3)}
    assert engine.module.decode is engine.decode


def test_threads_may_revert_at_once(engine):
    for _ in range(20):
        applied, start = apply((DECODE, GENERATE), None), threading.Barrier(4)

        def revert(applied=applied, start=start):
            start.wait()
            applied.revert()

        threads = [threading.Thread(target=revert) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert engine.module.decode is engine.decode


def test_the_table_fits_the_installed_engine():
    assert [problem for _, problem in check(PATCHES) if problem] == []
    assert len({patch.target for patch in PATCHES}) == len(PATCHES)


def test_install_and_revert_leave_llama_cpp_as_it_was():
    before = originals()
    installed = install(HookManager())
    assert all(originals()[key] is not original for key, original in before.items())
    assert bindings.llama_decode is llama_cpp.llama_decode
    assert "Llama.generate" in installed.targets()
    installed.revert()
    installed.revert()
    assert originals() == before
    assert installed.targets() == []


def test_wrappers_look_like_what_they_wrap():
    before = {key: inspect.signature(original) for key, original in originals().items()}
    installed = install(HookManager())
    try:
        after = originals()
        assert {key: inspect.signature(wrapper) for key, wrapper in after.items()} == before
    finally:
        installed.revert()


@pytest.mark.parametrize("version", ["0.3.34", "0.3.37", "0.4.0", "1.0", "dev", ""])
def test_versions_outside_the_range_are_refused(monkeypatch, version):
    before = originals()
    monkeypatch.setattr(llama_cpp, "__version__", version)
    with pytest.raises(
        IncompatibleError, match=r"is needed \(tested: 0\.3\.35, 0\.3\.36\)\. Try `pip install"
    ):
        install(HookManager())
    assert originals() == before


@pytest.mark.parametrize("version", ["0.3.35", "0.3.36", "0.3.36+cu124"])
def test_versions_inside_the_range(monkeypatch, version):
    monkeypatch.setattr(llama_cpp, "__version__", version)
    compat.check_version()

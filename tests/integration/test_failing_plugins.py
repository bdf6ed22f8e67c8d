"""Every hook × every failure × ``on_error``, on a running engine between two sound plugins.

With ``"log"`` the app gets vanilla's results and the other plugins see their usual calls. With
``"raise"`` it gets the named error, and the engine works as before afterwards.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from pathlib import Path

import fork_server
import pytest
from llama_cpp import Llama

from llmaas_hooks import HookManager, KVRestored, PluginError, hookimpl, serving_context, specs
from llmaas_hooks.discovery import load_plugin
from llmaas_patches import install

DIST = Path(__file__).parents[1] / "data" / "dist"
PROMPT = [1, 400, 401, 402, 403, 404]
ENGINE_HOOKS = [
    "llmaas_model_load",
    "llmaas_weights",
    "llmaas_context_create",
    "llmaas_native_context",
    "llmaas_app_batch",
    "llmaas_level",
    "llmaas_request_begin",
    "llmaas_kv_restore",
    "llmaas_prefill",
    "llmaas_decode",
    "llmaas_logits",
    "llmaas_kv_save",
    "llmaas_request_end",
]
ANSWERS = {"llmaas_kv_evict": 1, "llmaas_status": {"sound": True}, "llmaas_weights": []}


def fail():
    raise ZeroDivisionError("oops")


def interrupt():
    raise KeyboardInterrupt


def wrong_type():
    return "nonsense"


def plugin(**hooks):
    """Return a plugin with these hooks, each a function without arguments."""

    def method(name, body):
        return hookimpl(lambda self: body(), specname=name)

    return type("Plugin", (), {name: method(name, body) for name, body in hooks.items()})()


class Sound:
    """Plugin that implements every hook and records the called ones."""

    def __init__(self):
        self.called = []

    def plugin(self):
        return plugin(**{hook: lambda hook=hook: self._note(hook) for hook in specs.__all__})

    def _note(self, hook):
        self.called.append(hook)
        return ANSWERS.get(hook)


class Trial:
    """Active patches, a plugin that fails in one hook, and a sound plugin on either side of it."""

    def __init__(self, on_error, hook, failure):
        self.failure = failure
        self.early, self.late = Sound(), Sound()
        self.hooks = HookManager(on_error)
        self.hooks.register("late", self.late.plugin())  # pluggy calls the last one first
        self.hooks.register("bad", plugin(**{hook: lambda: self._fail(hook)}))
        self.hooks.register("early", self.early.plugin())
        self.installed = install(self.hooks)

    def _fail(self, hook):
        return ANSWERS.get(hook) if self.failure is None else self.failure()


@pytest.fixture
def trial():
    with contextlib.ExitStack() as stack:

        def start(on_error, hook, failure):
            found = Trial(on_error, hook, failure)
            stack.callback(found.installed.revert)
            return found

        yield start


def use(make):
    """Use an engine as an app does: load, generate, leave early, complete, evaluate a batch."""
    llama = make()
    generator = llama.generate(PROMPT, temp=0.0)
    tokens = [next(generator) for _ in range(4)]
    generator.close()
    text = llama("Once upon a time", max_tokens=4, temperature=0.0)["choices"][0]["text"]
    llama.eval([400])
    return tokens, text


@pytest.fixture(scope="module")
def vanilla(reference_model):
    """Return an app's results without plugins."""
    settings = {"n_ctx": 256, "seed": 1, "verbose": False, "n_threads": 1, "n_threads_batch": 1}
    with contextlib.closing(Llama(str(reference_model), **settings)) as llama:
        return use(lambda: llama)


@pytest.mark.parametrize("failure", [fail, wrong_type])
@pytest.mark.parametrize("hook", ENGINE_HOOKS)
def test_logged(trial, make, vanilla, caplog, *, hook, failure):
    sound = trial("log", hook, None)
    use(make)
    sound.installed.revert()
    found = trial("log", hook, failure)
    assert use(make) == vanilla
    assert found.early.called == sound.early.called
    silenced = {"llmaas_kv_restore"} & {hook}  # the cells are in doubt, so no later plugin is asked
    assert found.late.called == [name for name in sound.late.called if name not in silenced]
    (record,) = caplog.records
    assert f"plugin 'bad' failed in {hook}: " in record.getMessage()
    assert record.exc_info is not None
    times = found.early.called.count(hook)
    errors = found.hooks.errors()
    assert errors["bad"][hook]["count"] == times > 0
    assert set(errors) == {"bad"}
    assert set(errors["bad"]) == {hook}


@pytest.mark.parametrize("failure", [fail, wrong_type])
@pytest.mark.parametrize("hook", ENGINE_HOOKS)
def test_raised(trial, make, vanilla, hook, failure):
    found = trial("raise", hook, failure)
    with pytest.raises(PluginError, match=f"plugin 'bad' failed in {hook}") as caught:
        use(make)
    assert (caught.value.plugin, caught.value.hook) == ("bad", hook)
    assert (hook in found.late.called) == (hook != "llmaas_kv_restore")
    found.failure = None
    assert use(make) == vanilla


@pytest.mark.parametrize("on_error", ["log", "raise"])
@pytest.mark.parametrize("hook", ENGINE_HOOKS)
def test_ctrl_c_reaches_the_app(trial, make, vanilla, hook, on_error):
    found = trial(on_error, hook, interrupt)
    with pytest.raises(KeyboardInterrupt):
        use(make)
    assert found.hooks.errors() == {}
    found.failure = None
    assert use(make) == vanilla


@pytest.mark.parametrize("failure", [fail, interrupt])
@pytest.mark.parametrize("hook", ENGINE_HOOKS[5:])
def test_an_engine_is_as_good_after_it(trial, make, hook, failure):
    """The same ``Llama`` continues: neither its cells nor its books keep anything half done."""

    def ask(llama):
        generator = llama.generate([*PROMPT, 405, 406], temp=0.0)
        found = [next(generator) for _ in range(3)]
        generator.close()
        return found

    expected = ask(make(n_ubatch=1))  # a batch split then changes no bit
    found = trial("raise", hook, failure)
    llama = make(n_ubatch=1)
    with pytest.raises((PluginError, KeyboardInterrupt)):
        ask(llama)
    found.failure = None
    assert ask(llama) == expected


@pytest.mark.parametrize("how", ["close", "exhaust"])
@pytest.mark.parametrize("hook", ["llmaas_kv_save", "llmaas_request_end"])
def test_the_end_of_a_generator(trial, make, hook, how):
    def end(generator):
        next(generator)
        generator.close() if how == "close" else list(zip(generator, range(3), strict=False))

    trial("log", hook, fail)
    llama = make()
    generator = llama.generate(PROMPT, temp=0.0)
    end(generator)
    generator.close()  # nothing of the request is left


@pytest.mark.parametrize("failure", [fail, wrong_type])
@pytest.mark.parametrize("on_error", ["log", "raise"])
def test_a_context_is_freed_all_the_same(trial, make, on_error, failure):
    found = trial(on_error, "llmaas_context_free", failure)
    llama = make()
    llama.close()
    assert llama.ctx is None
    assert found.early.called[-1] == found.late.called[-1] == "llmaas_context_free"
    assert found.hooks.errors()["bad"]["llmaas_context_free"]["count"] == 1


@pytest.mark.parametrize("failure", [fail, wrong_type])
def test_deleting_a_context_is_never_silent(trial, failure):
    found = trial("log", "llmaas_kv_evict", failure)
    with pytest.raises(PluginError, match="'bad' failed in llmaas_kv_evict"):
        found.hooks.kv_evict("chat-1")
    assert found.early.called == found.late.called == ["llmaas_kv_evict"]


@pytest.mark.parametrize("failure", [fail, wrong_type])
def test_a_status_that_fails_hides_no_other(trial, failure):
    found = trial("log", "llmaas_status", failure)
    status = found.hooks.status()
    assert status["early"] == status["late"] == {"sound": True}
    assert status["bad"]["error"].startswith("plugin 'bad' failed in llmaas_status: ")
    strict = trial("raise", "llmaas_status", failure)
    with pytest.raises(PluginError, match="'bad' failed in llmaas_status"):
        strict.hooks.status()


@pytest.mark.parametrize("failure", [fail, wrong_type])
@pytest.mark.parametrize("on_error", ["log", "raise"])
def test_a_shutdown_that_fails_is_logged(trial, caplog, on_error, failure):
    found = trial(on_error, "llmaas_shutdown", failure)
    found.installed.revert()
    found.hooks.shutdown()
    assert found.early.called == found.late.called == ["llmaas_shutdown"]
    assert "plugin 'bad' failed in llmaas_shutdown" in caplog.text


@pytest.mark.parametrize("on_error", ["log", "raise"])
def test_restored_cells_that_are_not_there(patched, make, on_error):
    class Liar:
        lies = True

        @hookimpl
        def llmaas_kv_restore(self, request):
            return KVRestored(len(request.tokens), 0) if self.lies else None

    def ask(llama):
        generator = llama.generate(PROMPT, temp=0.0)
        found = [next(generator) for _ in range(3)]
        generator.close()
        return found

    vanilla = ask(make())
    patched(liar=Liar(), on_error=on_error)
    llama = make()
    if on_error == "raise":
        with pytest.raises(
            PluginError, match=r"'liar' failed in llmaas_kv_restore: .* fewer cells"
        ):
            ask(llama)
        Liar.lies = False
    assert ask(llama) == vanilla
    assert ask(make()) == vanilla


class Checking:
    """Plugin that gives every context a second sequence and examines it with ``check``."""

    def __init__(self, check):
        self.check = check

    @hookimpl
    def llmaas_context_create(self, create):
        create.params.n_seq_max = 2
        create.checks.append(functools.partial(self._look, "it"))

    def _look(self, _, ctx):
        assert ctx
        return self.check()


def test_a_check_of_a_context_that_fails_is_one_that_says_no(patched, make, vanilla, caplog):
    patched(bad=Checking(fail), on_error="log")
    assert use(make) == vanilla
    assert "plugin 'bad' failed in llmaas_context_create (check): ZeroDiv" in caplog.text


@pytest.mark.parametrize(
    ("failure", "error"), [(fail, PluginError), (interrupt, KeyboardInterrupt)]
)
def test_a_check_of_a_context_that_is_raised(patched, make, failure, error):
    plugin = Checking(failure)
    patched(bad=plugin)
    with pytest.raises(error):
        make()
    plugin.check = lambda: True
    assert make().create_completion("Once", max_tokens=1)["usage"]["completion_tokens"] == 1


def test_deferred_work_that_fails_is_named_and_counted(patched, make, caplog):
    class Deferring:
        @hookimpl
        def llmaas_kv_save(self, request):
            request.engine.defer(fail)

    installed = patched(lazy=Deferring(), on_error="raise")
    llama = make()
    for _ in range(3):
        list(zip(range(2), llama.generate(PROMPT, temp=0.0), strict=False))
    installed.settle()
    (record,) = caplog.records
    assert "plugin 'lazy' failed in llmaas_kv_save (deferred): ZeroDiv" in record.getMessage()


def test_contexts_are_kept_beside_a_plugin_that_always_fails(make, tmp_path):
    prompts = {name: [1, *range(first, first + 40)] for name, first in [("a", 400), ("b", 500)]}

    def ask_all():
        llama = make(n_ubatch=1)
        for name in ("a", "b", "a", "b"):
            with serving_context(name):
                generator = llama.generate(prompts[name], temp=0.0)
                yield [next(generator) for _ in range(3)]
                generator.close()
        llama.reset()  # a call of the app's own

    vanilla = list(ask_all())
    chunks = load_plugin("kv_chunks")
    settings = chunks.Config(codec="lossless", store=tmp_path / "kv")
    hooks = HookManager("log")
    hooks.register("kv_chunks", chunks(settings))
    broken = [hook for hook in ENGINE_HOOKS if hook != "llmaas_kv_restore"]
    hooks.register("bad", plugin(**dict.fromkeys([*broken, "llmaas_status"], fail)))
    installed = install(hooks)
    try:
        assert list(ask_all()) == vanilla
        assert hooks.status()["kv_chunks"]["restored_tokens"] > 0
        assert set(hooks.errors()["bad"]) == {*broken, "llmaas_status"}
    finally:
        installed.revert()
        hooks.shutdown()


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("broken_import", "failed in import: ModuleNotFoundError: No module named "),
        ("exits", "failed in import: SystemExit: usage: llmaas_test_exits FILE"),
        ("broken_constructor", "failed in construction: RuntimeError: no luck"),
        ("misspelled", "failed in registration: PluginValidationError: unknown hook"),
    ],
)
def test_llmaas_run_says_it_in_one_line(tmp_path, name, problem):
    (tmp_path / "app.py").write_text("print('the app ran')")
    done = fork_server.run(
        [sys.executable, "-m", "llmaas_plugins.cli.main", "run", "--plugins", name, "app.py"],
        env={**os.environ, "PYTHONPATH": str(DIST)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"llmaas: error: plugin '{name}' {problem}")
    assert done.stderr.count("\n") == 1

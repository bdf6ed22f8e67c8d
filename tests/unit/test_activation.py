"""Activation and deactivation: nested, refused, and failing."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time

import llama_cpp
import pytest
from forking import in_child

import llmaas_plugins
from llmaas_hooks import (
    ConfigError,
    IncompatibleError,
    PluginError,
    UnknownPluginError,
    hookimpl,
)
from llmaas_patches import collecting
from llmaas_plugins import activate, activation, active_suite, load_config

RECORDER = {"plugins": {"recorder": {"level": 5}}}


@pytest.fixture(autouse=True)
def vanilla_again():
    before = (llama_cpp.llama_decode, llama_cpp.Llama.generate)
    yield
    assert (llama_cpp.llama_decode, llama_cpp.Llama.generate) == before


def test_import_does_nothing():
    code = "import sys, threading, llmaas_plugins; sys.exit('llama_cpp' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_context_manager(dist_plugins):
    assert active_suite() is None
    with activate(RECORDER) as suite:
        assert active_suite() is suite
        assert suite.status()["plugins"] == {"recorder": {"level": 5}}
        assert "llama_cpp.llama_cpp.llama_decode" in suite.status()["patched"]
    assert active_suite() is None
    assert dist_plugins.events == ["construct", "shutdown"]


def test_an_exception_deactivates(dist_plugins):
    with pytest.raises(ZeroDivisionError), activate(RECORDER):
        raise ZeroDivisionError
    assert dist_plugins.events[-1] == "shutdown"


@pytest.mark.parametrize(
    ("owner", "last"),
    [(collecting.Collecting, "start"), (activation, "_say_what_is_without_effect")],
    ids=["in install", "after it"],
)
def test_ctrl_c_at_the_end_of_activate_leaves_nothing_patched(
    dist_plugins, monkeypatch, owner, last
):
    original = getattr(owner, last)

    def interrupted(*args):
        original(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(owner, last, interrupted)
    with pytest.raises(KeyboardInterrupt):
        activate(RECORDER)
    assert active_suite() is None  # and ``vanilla_again`` looks at the patches
    assert dist_plugins.events == ["construct", "shutdown"]


def test_nothing_enabled():
    with activate({}) as suite:
        assert suite.status()["plugins"] == {}


class Listener:
    def __init__(self):
        self.n_decoded = 0

    @hookimpl
    def llmaas_decode(self, step):
        self.n_decoded += step.n_tokens


def test_a_listener_hears_without_any_plugin(make_llama):
    listener = Listener()
    with activate({}, {"mine": listener}) as suite:
        llama = make_llama()
        llama.eval([1, 2, 3])
        assert listener.n_decoded == 3
        assert suite.status()["plugins"] == {}
        with pytest.raises(ConfigError, match="active with another"):
            activate({}, {"another": Listener()})
    llama.eval([4])
    assert listener.n_decoded == 3


def test_nested_is_one_suite(dist_plugins):
    with activate(RECORDER) as outer:
        with activate(load_config(RECORDER)) as inner:
            assert inner is outer
        assert active_suite() is outer
        assert dist_plugins.events == ["construct"]
    assert active_suite() is None
    assert dist_plugins.events == ["construct", "shutdown"]


def test_deactivate_twice_spares_the_next_suite(dist_plugins):
    first = activate(RECORDER)
    first.deactivate()
    with activate(RECORDER) as second:
        first.deactivate()
        assert active_suite() is second is not first
    assert dist_plugins.events == ["construct", "shutdown"] * 2


def test_another_configuration_is_refused(dist_plugins):
    with activate(RECORDER) as suite:
        with pytest.raises(ConfigError, match="active with another configuration"):
            activate({})
        assert active_suite() is suite
        assert dist_plugins.events == ["construct"]


@pytest.mark.parametrize(
    ("name", "settings", "error", "message"),
    [
        ("recorde", {}, UnknownPluginError, "Did you mean 'recorder'"),
        ("broken_import", {}, PluginError, "failed in import"),
        ("broken_constructor", {}, PluginError, "failed in construction: RuntimeError: no luck"),
        ("broken_config", {}, PluginError, "failed in configuration: ZeroDivisionError: no luck"),
        ("misspelled", {}, PluginError, "failed in registration"),
        ("exits", {}, PluginError, "failed in import: SystemExit"),
        ("not_a_class", {}, PluginError, "failed in import: TypeError"),
        ("recorder2", {}, UnknownPluginError, "recorder"),
        ("misspelled", {"key": 1}, ConfigError, "unknown key 'key'"),
    ],
)
def test_failing_plugin_leaves_nothing(dist_plugins, name, settings, error, message):
    with pytest.raises(error, match=message):
        activate({"plugins": {"recorder": {}, name: settings}})
    assert active_suite() is None
    assert dist_plugins.events == ["construct", "shutdown"]  # the sound plugin is closed


def failing_status(config):
    class Failing:
        @hookimpl
        def llmaas_status(self):
            raise ZeroDivisionError("no luck")

    suite = activate(config)
    suite.hooks.register("failing", Failing())
    return suite


def test_errors_are_in_the_status(dist_plugins):
    with failing_status(RECORDER) as suite:
        status = suite.status()
        last = "plugin 'failing' failed in llmaas_status: ZeroDivisionError: no luck"
        assert status["plugins"] == {"recorder": {"level": 5}, "failing": {"error": last}}
        assert status["errors"] == {"failing": {"llmaas_status": {"count": 1, "last": last}}}


def test_a_status_that_fails_keeps_nothing_from_ending(dist_plugins, caplog):
    with caplog.at_level(logging.INFO, "llmaas"):
        failing_status({**RECORDER, "on_error": "raise"}).deactivate()
    assert "no reports: plugin 'failing' failed in llmaas_status" in caplog.text
    assert active_suite() is None
    assert dist_plugins.events == ["construct", "shutdown"]


def test_engine_drift_leaves_nothing(dist_plugins, monkeypatch):
    monkeypatch.setattr(llama_cpp, "__version__", "0.2.0")
    with pytest.raises(IncompatibleError):
        activate(RECORDER)
    assert active_suite() is None
    assert dist_plugins.events == ["construct", "shutdown"]


def test_environment_is_a_door(dist_plugins, monkeypatch):
    monkeypatch.setenv("LLMAAS_PLUGINS", "recorder")
    monkeypatch.setenv("LLMAAS_PLUGINS__RECORDER__LEVEL", "9")
    with activate() as suite:
        assert suite.status()["plugins"] == {"recorder": {"level": 9}}


def test_threads_share_one_suite(dist_plugins):
    suites, start = [], threading.Barrier(8)

    def use():
        start.wait()
        suites.append(activate(RECORDER))

    threads = [threading.Thread(target=use) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(map(id, suites))) == 1
    for suite in suites:
        assert active_suite() is suite
        suite.deactivate()
    assert active_suite() is None
    assert dist_plugins.events == ["construct", "shutdown"]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # Python 3.12 warns about threads
@pytest.mark.parametrize("patience_s", [10.0, 0.1])
def test_a_child_forked_while_another_thread_activates_can_activate(monkeypatch, patience_s):
    """The fork waits for the activation, but not forever."""
    monkeypatch.setattr(activation, "_PATIENCE_S", patience_s)
    inside, go_on = threading.Event(), threading.Event()

    class Slow:
        def __dir__(self):  # pluggy looks for hooks
            inside.set()
            go_on.wait()
            return []

    thread = threading.Thread(target=lambda: activate({}, {"slow": Slow()}).deactivate())
    thread.start()
    inside.wait()
    timer = threading.Timer(0.5, go_on.set)
    if patience_s > 1:
        timer.start()
    found = in_child(lambda: activate({}).deactivate())
    assert go_on.is_set() == (patience_s > 1)
    go_on.set()
    thread.join()
    assert found == 0


def test_public_names():
    assert all(hasattr(llmaas_plugins, name) for name in llmaas_plugins.__all__)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # Python 3.12 warns about threads
def test_a_fork_waits_while_another_thread_imports_for_the_status(monkeypatch):
    """A child could not finish the import, and would wait for it forever."""
    name, is_importing = "llmaas_plugins.memory.owners", threading.Event()

    class Slow:
        """Finder that takes its time, and leaves the module to the others."""

        @staticmethod
        def find_spec(wanted, *_):
            if wanted == name:
                is_importing.set()
                time.sleep(0.3)

    with activate({"plugins": {}}) as suite:
        monkeypatch.delitem(sys.modules, name, raising=False)
        monkeypatch.setattr(sys, "meta_path", [Slow, *sys.meta_path])
        thread = threading.Thread(target=suite.memory)
        thread.start()
        assert is_importing.wait(10)
        assert in_child(suite.memory) == 0
        thread.join()

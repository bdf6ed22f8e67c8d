"""The contract kit finds plugins that break the contract, and passes one that obeys it."""

from __future__ import annotations

import threading

import pytest
from pydantic import BaseModel, ConfigDict

from llmaas_hooks import PluginError, hookimpl
from llmaas_hooks.testing import FakeEngine, check_contract, running, serve

PROMPT = [1, 2, 3]


class Sound:
    class Config(BaseModel):
        model_config = ConfigDict(frozen=True, extra="forbid")
        token: int = 5

    def __init__(self, config):
        self.token, self.seen = config.token, []

    @hookimpl
    def llmaas_logits(self, view):
        view.logits[self.token] += 1

    @hookimpl
    def llmaas_request_end(self, request, stats):
        request.engine.defer(lambda: self.seen.append(stats.n_generated))

    @hookimpl
    def llmaas_status(self):
        return {"seen": self.seen}


def use(hooks):
    serve(hooks, FakeEngine(), PROMPT, app="mail")


def test_a_sound_plugin_passes():
    check_contract(Sound, {"token": 7}, use)


def test_a_thread_of_somebody_else_may_end_meanwhile():
    ends = threading.Event()
    other = threading.Thread(target=ends.wait)
    other.start()

    class Patient(Sound):
        def __init__(self, config):
            super().__init__(config)
            ends.set()
            other.join()

    check_contract(Patient, {}, use)


def test_a_request_is_served():
    with running({"sound": Sound(Sound.Config(token=7))}) as plugins:
        assert serve(plugins.hooks, FakeEngine(), PROMPT) == [7, 7, 7]
        assert plugins.status("sound") == {"seen": [3]}


class Loose(Sound):
    class Config(BaseModel):
        model_config = ConfigDict(frozen=True)


class Fluid(Sound):
    class Config(BaseModel):
        model_config = ConfigDict(extra="forbid")
        token: int = 5


class Eager(Sound):
    def __init__(self, config):
        super().__init__(config)
        self.file = open(__file__)  # noqa: PTH123, SIM115


class Untidy(Sound):
    @hookimpl
    def llmaas_request_begin(self):
        self.file = open(__file__)  # noqa: PTH123, SIM115


class Busy(Sound):
    ends = threading.Event()

    @hookimpl
    def llmaas_request_begin(self):
        threading.Thread(target=self.ends.wait, name="busy", daemon=True).start()


class Failing(Sound):
    @hookimpl
    def llmaas_decode(self):
        raise ZeroDivisionError


class Wrong(Sound):
    @hookimpl
    def llmaas_level(self):
        return 0.5


class Late(Sound):
    @hookimpl
    def llmaas_shutdown(self):
        raise ZeroDivisionError


@pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)
@pytest.mark.parametrize(
    ("kind", "error", "said"),
    [
        (Loose, AssertionError, 'set extra="forbid"'),
        (Fluid, AssertionError, "set frozen=True"),
        (Eager, AssertionError, "the constructor opens files"),
        (Untidy, AssertionError, "files are open after llmaas_shutdown"),
        (Busy, AssertionError, r"threads still run after llmaas_shutdown: .'busy'"),
        (Failing, PluginError, "failed in llmaas_decode: ZeroDivisionError"),
        (Wrong, PluginError, "returned float, expected Levels or None"),
        (Late, AssertionError, "hooks failed at the end"),
    ],
)
def test_what_breaks_the_contract_is_named(kind, error, said):
    Busy.ends.clear()
    try:
        with pytest.raises(error, match=said):
            check_contract(kind, {}, use)
    finally:
        Busy.ends.set()

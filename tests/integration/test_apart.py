"""Apps on one engine: no app finds another app's data in its cells, unless the apps share."""

from __future__ import annotations

import pytest
from llama_cpp import Llama

from llmaas_hooks import hookimpl
from llmaas_hooks.request_scope import serving_context, without
from llmaas_plugins import activate, active_suite

PROMPT = [1, *range(400, 500)]
OTHER = [1, *range(600, 700)]
NEW = (0, len(PROMPT))
KV = {"codec": "lossless", "recompute": False, "swap_out": "on_demand"}
SETTINGS = {
    "no plugin": None,
    "chunks": KV,
    "bits": {**KV, "codec": "tolerance"},
    "parked": {**KV, "codec": "tolerance", "parked_tokens": 512},
}


class Work:
    """Count of tokens that requests reused and of tokens that the engine evaluated."""

    def __init__(self):
        self.n_evaluated = self.n_reused = 0

    @hookimpl
    def llmaas_decode(self, step):
        self.n_evaluated += step.n_tokens

    @hookimpl
    def llmaas_request_end(self, stats):
        self.n_reused += stats.n_reused


class Asked:
    """One engine and its cost per request: tokens reused, tokens evaluated."""

    def __init__(self, llama, work):
        self.llama, self._work = llama, work

    def __call__(self, app, tokens=PROMPT, **options):
        with serving_context(None, app):
            return self.cost(lambda: self._generate(tokens, **options))

    def cost(self, act):
        before = self._work.n_reused, self._work.n_evaluated
        act()
        return self._work.n_reused - before[0], self._work.n_evaluated - before[1]

    def _generate(self, tokens, **options):
        generator = self.llama.generate(tokens, temp=0.0, **options)
        next(generator)
        generator.close()


@pytest.fixture
def asked(make, tmp_path):
    """Return a function that activates kv_chunks' settings, or no plugin, and opens an engine."""
    work, started = Work(), []

    def start(kv, **engine):
        plugins = {} if kv is None else {"kv_chunks": {"store": str(tmp_path / "kv"), **kv}}
        started.append(activate({"on_error": "raise", "plugins": plugins}, {"work": work}))
        return Asked(make(n_ctx=512, flash_attn=True, **engine), work)

    yield start
    for suite in started:
        suite.deactivate()


@pytest.mark.parametrize("kv", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("second", ["mail", None], ids=["named", "without a name"])
def test_an_app_finds_nothing_of_another(asked, kv, second):
    ask = asked(kv)
    assert ask("game") == NEW
    assert ask(second) == NEW  # what the other app asked just now
    assert ask(second, OTHER) == (1, len(OTHER) - 1)  # what nobody asked
    ask("game", OTHER)
    assert ask(second, PROMPT[:80]) == ((0, 80) if kv is None else (80, 1))
    ask.llama.close()


@pytest.mark.parametrize("kv", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("app", ["game", None])
def test_an_app_finds_its_own(asked, kv, app):
    ask = asked(kv)
    ask(app)
    assert ask(app, [*PROMPT, 7]) == (len(PROMPT), 1)
    ask(app, OTHER)
    assert ask(app, OTHER[:50]) == (50, 1)
    if kv is not None:
        ask("another")
        assert ask(app) == (len(PROMPT), 1)
    ask.llama.close()


@pytest.mark.parametrize("kv", list(SETTINGS.values())[1:], ids=list(SETTINGS)[1:])
def test_apps_share_where_that_is_configured(asked, kv):
    ask = asked({**kv, "share_across_apps": True})
    ask("game")
    assert ask("mail") == (len(PROMPT), 1)  # resident
    status = active_suite().status()["plugins"]["kv_chunks"]
    assert (status["restores"], status["restored_tokens"]) == (0, 0)
    assert ask("game", [*PROMPT, 7, 8]) == (len(PROMPT), 2)
    ask("game", OTHER)
    assert ask("mail", [*PROMPT, 9]) == (len(PROMPT), 1)  # parked or stored
    ask.llama.close()


def test_cells_of_a_request_without_the_plugin_are_not_parked_as_anothers(asked):
    ask = asked(SETTINGS["parked"])
    ask("game", OTHER)
    with without("kv_chunks"):
        assert ask("mail") == NEW
    ask("game", OTHER)  # leaves mail's cells
    assert ask("game") == (1, len(PROMPT) - 1)
    ask.llama.close()


def test_cells_of_another_app_are_not_stored_as_ones_own(asked):
    ask = asked(SETTINGS["chunks"])
    ask("game")
    ask("mail", [7], reset=False)  # continues explicitly with game's cells
    ask("chess", OTHER)
    assert ask("mail") == NEW
    assert ask("game") == (len(PROMPT), 1)
    ask.llama.close()


def test_echoed_logprobs_evaluate_another_apps_prompt(asked):
    ask = asked(None, logits_all=True)
    prompt = "The station is near the quiet room with a view."
    tokens = ask.llama.tokenize(prompt.encode())
    ask("game", tokens)

    def echo():
        with serving_context(None, "mail"):
            ask.llama.create_completion(prompt, max_tokens=1, echo=True, logprobs=1)

    assert ask.cost(echo) == (0, len(tokens))
    ask.llama.close()


def test_a_state_stays_the_apps_that_saved_it(asked):
    ask = asked(None)
    ask("game")
    state = ask.llama.save_state()
    ask("mail", OTHER)
    with serving_context(None, "mail"):
        ask.llama.load_state(state)
    assert ask("mail") == NEW
    ask.llama.load_state(state)
    assert ask("game") == (len(PROMPT), 1)
    ask.llama.close()


def test_what_an_app_evaluates_itself_is_its_own(asked):
    ask = asked(None)
    ask("game")
    with serving_context(None, "mail"):  # as chat handlers with images do
        ask.llama.reset()
        ask.llama.eval(PROMPT)
    assert ask("mail") == (len(PROMPT), 0)
    ask.llama.close()


def test_an_app_that_fails_in_the_middle_does_not_own_the_books(asked, monkeypatch):
    """Embedding clears the cells first, and Llama's books only at the end."""
    ask = asked(None, embedding=True)
    ask("game")

    def fail(*_):
        raise RuntimeError("no memory")

    with monkeypatch.context() as patch, serving_context(None, "mail"):
        patch.setattr(Llama, "tokenize", fail)
        with pytest.raises(RuntimeError, match="no memory"):
            ask.llama.embed("text")
    assert ask("mail") == NEW
    ask.llama.close()

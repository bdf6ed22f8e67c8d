"""All plugins in one app: the settings of each, which text they promise, and the app.

To add a plugin or a setting, add it to ``SETTINGS``, and to ``changes`` if it may change the text.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fork_server
from budgets import make_room, squeeze
from llama_cpp import Llama

from llmaas_hooks import serving_context
from llmaas_plugins import activate, deadlines, elastic

SUPPORT = str(Path(__file__).parent)
ENGINE = {"n_ctx": 256, "n_ubatch": 1, "n_threads": 1, "n_threads_batch": 1, "verbose": False}
"""One token at a time: which tokens are evaluated together must not matter."""


@dataclass(frozen=True)
class Setting:
    """A plugin's settings in the matrix.

    Attributes:
        table: Table of the plugin in the configuration.
        level: Levels that each request asks for.
        promise: Latency that each request asks for.
    """

    table: dict[str, Any] = field(default_factory=dict)
    level: dict[str, float] = field(default_factory=dict)
    promise: dict[str, str] = field(default_factory=dict)


_KV = {"recompute": False, "parked_tokens": 256}
SETTINGS = {
    "kv_chunks": {
        "lossless": Setting(_KV | {"codec": "lossless"}),
        "tolerance": Setting(_KV | {"codec": "tolerance"}),
    },
    "flash_weights": {
        "exact": Setting({"arena": "1 MiB"}),
        "sparse": Setting({"arena": "1 MiB", "mode": "sparse", "sparsity": 0.6}),
    },
    "elastic": {
        "whole": Setting(),
        "narrow": Setting(level={"level": 0.5}),
    },
    "knn_lm": {
        "alpha 0": Setting({"alpha": 0.0}),
        "drafts": Setting({"mix": False, "drafts": True}),
        "mixing": Setting({"k": 16}),
    },
    "deadlines": {
        "easy": Setting(promise={"ttft": "3000 s", "tpot": "60 s"}),
        "tight": Setting(promise={"tpot": "55 %"}),
    },
}
PAIRS, DRAFTS = "pairs", "drafts"
"""Datastores beside the model: of other chats, and of what the model itself says here."""
NARROW_ANSWERS = Setting(level={"decode": 0.5})
"""Levels that a tight promise leads to: the widest one that takes at most 55 % of the time."""


def combinations(*plugins):
    """Return all combinations of settings of these plugins, each on."""
    names = [list(SETTINGS[plugin]) for plugin in plugins]
    return [dict(zip(plugins, chosen, strict=True)) for chosen in itertools.product(*names)]


def pairs():
    """Return all combinations of two plugins, with nothing else on."""
    return [one for two in itertools.combinations(SETTINGS, 2) for one in combinations(*two)]


def covering():
    """Return a few combinations in which each two settings, or a setting and an off, meet."""
    options = [[(plugin, one) for one in (None, *SETTINGS[plugin])] for plugin in SETTINGS]
    rows = list(itertools.product(*options))
    meetings = {row: set(itertools.combinations(row, 2)) for row in rows}
    missing, found = set.union(*meetings.values()), []
    while missing:
        best = max(rows, key=lambda row: len(meetings[row] & missing))
        missing -= meetings[best]
        found.append({plugin: one for plugin, one in best if one is not None})
    return found


def name_of(combination):
    """Return a name for a test."""
    return ", ".join(f"{plugin} {one}" for plugin, one in combination.items()) or "nothing"


# -- promised texts --------------------------------------------------------------------------------


def changes(combination):
    """Return the settings of a combination that may change the text, by plugin.

    The text of a combination is that of these settings alone, cold, in memory, in a process without
    the others. Without any, it is vanilla's.

    | setting | text |
    |---|---|
    | `kv_chunks` lossless, `flash_weights` exact, `elastic` whole, `knn_lm` alpha 0 or drafts,
      `deadlines` without levels to choose from, or with time for the whole model | vanilla's |
    | `flash_weights` sparse | its own; neither budget nor stored cells matter |
    | `elastic` narrow, by request | its own |
    | `deadlines` tight with levels | that of the levels that fit, if a request asks for none |
    | `knn_lm` mixing | its own; at levels below 1, the model's |

    ``is_exact`` says whether that holds in contexts that `kv_chunks` restores.

    Behind parked cells, attention is added up in another order, which may move logits a little
    (docs/reference/limitations.md). The texts are equal because no two tokens here are nearly as
    likely.
    """
    found = {}
    if combination.get("flash_weights") == "sparse":
        found["flash_weights"] = "sparse"
    if combination.get("elastic") == "narrow":
        found["elastic"] = "narrow"
    elif "elastic" in combination and combination.get("deadlines") == "tight":
        found["elastic"] = "narrow answers"
    if combination.get("knn_lm") == "mixing" and found.get("elastic") != "narrow":
        found["knn_lm"] = "mixing"
    return found


def is_exact(combination):
    """Return whether a restored context says what a context says that is evaluated again.

    It does not with fewer bits. Nor if answers have another level than prompts: restored cells keep
    the level of the answer, and cells that are evaluated again get that of the prompt.
    """
    has_levels = changes(combination).get("elastic") == "narrow answers"
    return "kv_chunks" not in combination or (
        combination["kv_chunks"] == "lossless" and not has_levels
    )


# -- the app ---------------------------------------------------------------------------------------

SYSTEM = "My name is Anna and I live in a small house near the station. I have a dog.\n"
FIRST = {"a": "Where does Bruno sleep?", "b": "Tell me, when is the boat to work?"}
NEXT = "Who feeds Bruno?"
N_SAID = 12
ROOM_FOR_CHUNKS = 6
"""MiB beyond the least budget: kv_chunks serves no context without room for its buffers."""


def setting(plugin, name):
    return NARROW_ANSWERS if name == "narrow answers" else SETTINGS[plugin][name]


def config_of(combination, model, store):
    """Return the configuration of a combination."""
    datastore = DRAFTS if combination.get("knn_lm") == "drafts" else PAIRS
    stores = {"kv_chunks": str(store), "knn_lm": str(model.parent / datastore)}
    plugins = {
        plugin: setting(plugin, one).table | ({"store": stores[plugin]} if plugin in stores else {})
        for plugin, one in combination.items()
    }
    return {"on_error": "raise", "plugins": {"kv_chunks": {"enabled": False}, **plugins}}


class App:
    """Contexts of an app on one engine.

    Attributes:
        contexts: Tokens of each context.
        said: Answers so far, by context.
    """

    def __init__(self, combination, contexts, llama, prepare):
        self._llama, self._prepare = llama, prepare
        self._settings = [setting(*one) for one in combination.items()]
        self.contexts = contexts or {name: self._tokens(SYSTEM) for name in FIRST}
        self.said = {name: [] for name in FIRST}

    def ask(self, name, question):
        """Add a question and its answer to a context."""
        self._prepare()
        self.contexts[name] += self._tokens(f"User: {question}\nAssistant:", add_bos=False)
        with contextlib.ExitStack() as stack:
            stack.enter_context(serving_context(name, "app"))
            for one in self._settings:
                if one.level:
                    stack.enter_context(elastic.level(**one.level))
                if one.promise:
                    stack.enter_context(deadlines.slo(**one.promise))
            answer = self._llama.generate(self.contexts[name], temp=0.0)
            found = [next(answer) for _ in range(N_SAID)]
            answer.close()
        self.contexts[name] += found
        self.said[name].append(found)

    def ask_in_child(self, name, question):
        """Ask in a forked child, and return what it was told."""
        reader, writer = os.pipe()
        if (pid := os.fork()) == 0:
            code = 1
            try:
                self.ask(name, question)
                os.write(writer, json.dumps(self.said[name][-1]).encode())
                code = 0
            finally:
                os._exit(code)
        os.close(writer)
        with os.fdopen(reader, "rb") as answer:
            found = answer.read()
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        return json.loads(found)

    def _tokens(self, text, *, add_bos=True):
        return self._llama.tokenize(text.encode(), add_bos=add_bos, special=True)


@contextlib.contextmanager
def opened(model, combination, store, *, is_alone):
    """Open an engine with the plugins of a combination.

    Yield the suite, None for vanilla, the engine, and a function to call before each request. It
    lowers the budget as far as possible, as a process takes memory for code that it has not used.
    """
    with contextlib.ExitStack() as stack:
        suite = flash = None
        n_more = ROOM_FOR_CHUNKS if "kv_chunks" in combination else 0
        if combination or not is_alone:
            suite = stack.enter_context(activate(config_of(combination, model, store)))
        if "flash_weights" in combination and not is_alone:
            flash = suite.plugin("flash_weights")
            make_room(flash)
        llama = stack.enter_context(contextlib.closing(Llama(str(model), **ENGINE)))
        yield suite, llama, (lambda: None) if flash is None else (lambda: squeeze(flash, n_more))


def stage(model, combination, store, contexts=None, *, is_alone=False):
    """Run the app, from the start or with contexts of an earlier stage.

    With ``is_alone``, weights are not streamed, and without plugins nothing is activated.

    Returns:
        The answers in each context (``said``), the one of a forked child (``in_child``), the tokens
        of the contexts, and the suite's status.
    """
    with opened(model, combination, store, is_alone=is_alone) as (suite, *engine):
        app, found = App(combination, contexts, *engine), {}
        if contexts is None:
            for name, question in FIRST.items():
                app.ask(name, question)
            app.ask("a", NEXT)
            found["in_child"] = app.ask_in_child("b", NEXT)
        else:
            for name in FIRST:
                app.ask(name, NEXT)
        found["status"] = None if suite is None else suite.status()
    return found | {"said": app.said, "contexts": app.contexts}


def run(model, combination, store, contexts=None, *, is_alone=False):
    """Run a stage in a process of its own, whose home is the model's folder."""
    arguments = [str(model), str(store), json.dumps([combination, contexts, is_alone])]
    done = fork_server.run(
        [sys.executable, "-c", "import together; together.main()", *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": SUPPORT, "HOME": str(model.parent)},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def main():
    """Run the stage that the arguments name, and print what it found."""
    model, store, rest = sys.argv[1:]
    combination, contexts, is_alone = json.loads(rest)
    found = stage(Path(model), combination, Path(store), contexts, is_alone=is_alone)
    sys.stdout.write(json.dumps(found))

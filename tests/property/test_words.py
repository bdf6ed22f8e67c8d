"""Plugins together say exactly what one of them alone says, or what vanilla says.

This holds in settings that promise equality, whatever happens in between. One such setting is
``n_ubatch=1``: a token's logits then do not depend on the other tokens of its batch. Weights are
streamed, and children continue with engines. A run is drawn from its seed, and a failure shows
the whole run.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import random
import re
from dataclasses import dataclass

import pytest
from budgets import is_streamed, make_room, squeeze
from datastores import ENGINE, QUESTIONS, K, built
from forking import in_child
from llama_cpp import Llama, LlamaGrammar, LogitsProcessorList
from packed_models import pack
from preparing import prepare
from soak import scale

from llmaas_plugins import activate, elastic, without

NAMES = ("kv_chunks", "flash_weights", "elastic", "knn_lm")
COMBINATIONS = [*itertools.combinations(NAMES, 2), NAMES]
N_STEPS = scale(10, 60)
N_SEEDS = scale(1, 6)  # seeds in one part of the run
N_TOKENS = 8
NARROW = 0.5
FIRST = f"User: {QUESTIONS[1]}\nAssistant: At seven, from the pier.\nUser: "
PROMPTS = (
    f"{FIRST}{QUESTIONS[0]}\nAssistant:",
    f"{FIRST}{QUESTIONS[0]}\nAssistant: Bruno sleeps in the old boat.\nUser: Why?\nAssistant:",
    f"User: {QUESTIONS[2]}\nAssistant:",
)
OPTIONS = {
    "greedy": {"temp": 0.0},
    "sampled": {"temp": 0.9},
    "penalties": {"temp": 0.0, "repeat_penalty": 1.3},
    "grammar": {"temp": 0.0, "grammar": r"root ::= [ -~\n]*"},
    "processor": {"temp": 0.0},
}
TOOL = {
    "name": "feed",
    "parameters": {
        "type": "object",
        "properties": {"who": {"type": "string"}, "at": {"type": "integer"}},
        "required": ["who", "at"],
    },
}
TOOLS = [{"type": "function", "function": TOOL}]
CHATS = {
    "chat": {"temperature": 0.9},
    "any tool": {"temperature": 0.0, "tools": TOOLS, "tool_choice": "auto"},
    "tool": {
        "temperature": 0.0,
        "tools": TOOLS,
        "tool_choice": {"type": "function", "function": {"name": "feed"}},
    },
}
ASKED = (*OPTIONS, *CHATS)


def says(llama, prompt, option):
    """Return the reply to a prompt, or to a question in a chat."""
    llama.set_seed(7)
    return chats(llama, prompt, option) if option in CHATS else generates(llama, prompt, option)


def chats(llama, prompt, option):
    """Return a chat completion's choices; the second prompt is streamed."""
    messages, is_stream = [{"role": "user", "content": QUESTIONS[prompt]}], prompt == 1
    found = llama.create_chat_completion(
        messages, max_tokens=N_TOKENS, stream=is_stream, **CHATS[option]
    )
    parts = list(found) if is_stream else [found]
    return re.sub(r"cmpl-[0-9a-f-]+", "id", str([part["choices"] for part in parts]))


def generates(llama, prompt, option):
    """Return tokens, and for ``processor`` the logits that they were sampled from."""
    rows, given = [], dict(OPTIONS[option])

    def watch(tokens, scores):
        rows.append((len(tokens), scores.copy()))
        return scores

    if option == "processor":
        given["logits_processor"] = LogitsProcessorList([watch])
    if "grammar" in given:
        given["grammar"] = LlamaGrammar.from_string(given["grammar"], verbose=False)
    stream = llama.generate(llama.tokenize(PROMPTS[prompt].encode()), **given)
    tokens = list(itertools.islice(stream, N_TOKENS))
    stream.close()
    return tokens, [(n, row.tobytes()) for n, row in rows]


def engine(model, n_batch=512):
    settings = {"n_ubatch": 1, "n_batch": n_batch, "chat_format": "chatml-function-calling"}
    return Llama(str(model), **ENGINE | settings)


@dataclass
class Process:
    """An app with some plugins: its engine and its next operations."""

    model: object
    config: dict
    n_batch: int = 512
    suite: object = None
    llama: object = None
    has_streamed: bool = False

    def __post_init__(self):
        self.restart(self.n_batch)

    def engine(self, n_batch):
        """Return a new engine, whose weights are streamed if flash_weights is active."""
        if "flash_weights" not in self.config:
            return engine(self.model, n_batch)
        flash = self.suite.plugin("flash_weights")
        make_room(flash)
        llama = engine(self.model, n_batch)
        squeeze(flash, n_batch % 5)  # 0, 1 or 2 MiB above the least
        return llama

    def look(self):
        """Note whether weights were streamed so far."""
        status = self.suite.status()
        assert status["errors"] == {}
        models = status["plugins"].get("flash_weights", {}).get("models", ())
        self.has_streamed |= any(map(is_streamed, models))

    def restart(self, n_batch):
        self.close()
        self.suite = activate({"on_error": "raise", "plugins": self.config})
        self.llama = self.engine(n_batch)

    def close(self):
        if self.suite is not None:
            self.llama.close()
            self.suite.deactivate()
            self.suite = None

    def drop(self, n_batch):
        self.llama = self.engine(n_batch)  # the previous engine ends with its last reference

    def collect(self):
        self.llama.itself = self.llama  # a cycle, which only the collector frees
        self.llama = self.engine(self.n_batch)
        gc.collect()

    def cancel(self, prompt, n):
        stream = self.llama.generate(self.llama.tokenize(PROMPTS[prompt].encode()), temp=0.0)
        found = list(itertools.islice(stream, n))
        if n % 2:
            stream.close()
        return found

    def abort(self, prompt, n):
        calls, decode = itertools.count(), self.llama._ctx.decode

        def fail(batch):
            if next(calls) == n:
                raise RuntimeError("the client left")
            decode(batch)

        self.llama._ctx.decode = fail
        try:
            with contextlib.suppress(RuntimeError):
                says(self.llama, prompt, "greedy")
        finally:
            self.llama._ctx.decode = decode

    def ask(self, prompt, option, declined):
        with without(*declined):
            return says(self.llama, prompt, option)

    def fork(self, prompt, option, declined, expected):
        """Fork a child that answers; the parent's engine must stay unaffected."""

        def answers():
            assert self.ask(prompt, option, declined) == expected
            assert self.suite.status()["errors"] == {}

        return expected if in_child(answers) == 0 else "not what the child says"

    def narrow(self, prompt, option):
        """Ask at one level; empty the cells before and after, as narrow cells serve any level."""
        self.llama.reset()
        with elastic.level(NARROW), without("kv_chunks"):
            found = says(self.llama, prompt, option)
        self.llama.reset()
        return found


def drawn(rng, names):
    """Yield the operations, and for each request the plugin whose answer alone is expected."""
    ways = ["ask"] * 6 + ["cancel", "abort", "collect", "drop", "restart", "fork"]
    ways += ["narrow"] * ("elastic" in names)
    for _ in range(N_STEPS):
        way, prompt = rng.choice(ways), rng.randrange(len(PROMPTS))
        option = rng.choice(ASKED)
        if way in {"ask", "fork"}:
            declined = tuple(name for name in names if rng.random() < 0.15)
            yield way, prompt, option, declined
        elif way == "narrow":
            yield way, prompt, option
        elif way in {"cancel", "abort"}:
            yield way, prompt, rng.randrange(1, 5)
        else:
            yield (way,) if way == "collect" else (way, rng.choice([5, 16, 512]))


def kind_of(step, names):
    if step[0] == "narrow":
        return "elastic"
    mixes = "knn_lm" in names and "knn_lm" not in step[3]
    return "knn_lm" if mixes else "vanilla"


@pytest.fixture(scope="module")
def model(reference_model, tmp_path_factory):
    path = prepare(reference_model, tmp_path_factory.mktemp("words") / "model.gguf")
    pack(path)
    return path


@pytest.fixture(scope="module")
def knn(model, tmp_path_factory):
    """Return a datastore, and the conversations that drafts are taken from."""
    store = built(model, tmp_path_factory.mktemp("knn"))
    return {"store": str(store), "k": K, "look_back": 12}


@pytest.fixture(scope="module")
def alone(model, knn):
    """Return a function that computes one plugin's answer alone, or vanilla's, each time anew."""
    known = {}
    configs = {"vanilla": None, "knn_lm": {"knn_lm": knn}, "elastic": {"elastic": {}}}

    def compute(kind, wanted):
        config = configs[kind]
        with contextlib.ExitStack() as stack:
            if config is not None:
                stack.enter_context(activate({"on_error": "raise", "plugins": config}))
            llama = stack.enter_context(contextlib.closing(engine(model)))
            for prompt, option in wanted:
                llama.reset()
                with elastic.level(NARROW) if kind == "elastic" else contextlib.nullcontext():
                    known[kind, prompt, option] = says(llama, prompt, option)

    def look_up(steps, names):
        wanted = {(kind_of(step, names), *step[1:3]) for step in steps if len(step) > 2}
        wanted -= known.keys()
        for kind in configs:
            if missing := [one[1:] for one in sorted(wanted, key=str) if one[0] == kind]:
                compute(kind, missing)
        return known

    return look_up


def check(names, seed, model, knn, alone, tmp_path):  # noqa: PLR0917
    rng = random.Random(f"{seed} {names}")
    steps = list(drawn(rng, names))
    tables = {
        "kv_chunks": {
            "store": str(tmp_path / f"kv{seed}"),
            "codec": "lossless",
            "recompute": False,
        },
        "flash_weights": {"memory_budget": "1 MiB", "arena": "1 MiB"},
        "elastic": {},
        "knn_lm": knn | {"drafts": rng.random() < 0.5},
    }
    asked = [step for step in steps if step[0] in {"ask", "fork", "narrow"}]
    expected = alone(asked, names)
    process = Process(model, {name: tables[name] for name in names})
    try:
        for i, (way, *given) in enumerate(steps):
            if way not in {"ask", "fork", "narrow"}:
                getattr(process, way)(*given)
                continue
            kind = kind_of(steps[i], names)
            wanted = expected[kind, *given[:2]]
            found = getattr(process, way)(*given, *[wanted] * (way == "fork"))
            told = f"seed {seed}, {names}: step {i} of {steps[: i + 1]} says not what {kind} says"
            assert found == wanted, told
            process.look()
    finally:
        process.close()
    return process.has_streamed


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("names", COMBINATIONS, ids="+".join)
@pytest.mark.parametrize("first", range(0, scale(1, 30), N_SEEDS))
def test_together_they_say_what_one_alone_says(  # noqa: PLR0917  its fixtures
    first, names, model, knn, alone, tmp_path
):
    seeds = range(first, first + N_SEEDS)
    streamed = [check(names, seed, model, knn, alone, tmp_path) for seed in seeds]
    assert any(streamed) == ("flash_weights" in names)

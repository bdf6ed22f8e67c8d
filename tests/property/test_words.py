"""Words never change by accident: plugins together say what one of them alone says, or vanilla.

In settings that promise equality, whatever happens in between. ``n_ubatch=1`` is one of them: then
a token's logits do not depend on which others were evaluated with it. A run is drawn from its seed,
and told whole when it fails.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import random
from dataclasses import dataclass, field

import pytest
from datastores import ENGINE, QUESTIONS, K, built
from llama_cpp import Llama, LlamaGrammar, LogitsProcessorList
from packed_models import pack
from preparing import prepare
from soak import scale

from llmaas_plugins import activate, elastic, without

NAMES = ("kv_chunks", "flash_weights", "elastic", "knn_lm")
COMBINATIONS = [*itertools.combinations(NAMES, 2), NAMES]
N_STEPS = scale(10, 60)
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


def says(llama, prompt, option):
    """Tokens, and for ``processor`` the logits that they were sampled from."""
    rows, given = [], dict(OPTIONS[option])

    def watch(tokens, scores):
        rows.append((len(tokens), scores.copy()))
        return scores

    if option == "processor":
        given["logits_processor"] = LogitsProcessorList([watch])
    if "grammar" in given:
        given["grammar"] = LlamaGrammar.from_string(given["grammar"], verbose=False)
    llama.set_seed(7)
    stream = llama.generate(llama.tokenize(PROMPTS[prompt].encode()), **given)
    tokens = list(itertools.islice(stream, N_TOKENS))
    stream.close()
    return tokens, [(n, row.tobytes()) for n, row in rows]


def engine(model, n_batch=512):
    return Llama(str(model), **ENGINE | {"n_ubatch": 1, "n_batch": n_batch})


@dataclass
class Process:
    """An app with some plugins: its engine, and what it may do next."""

    model: object
    config: dict
    n_batch: int = 512
    suite: object = None
    llama: object = None
    done: list = field(default_factory=list)

    def __post_init__(self):
        self.restart(self.n_batch)

    def restart(self, n_batch):
        self.close()
        self.suite = activate({"on_error": "raise", "plugins": self.config})
        self.llama = engine(self.model, n_batch)

    def close(self):
        if self.suite is not None:
            self.llama.close()
            self.suite.deactivate()
            self.suite = None

    def drop(self, n_batch):
        self.llama = engine(self.model, n_batch)  # the one before ends when nobody has it

    def collect(self):
        self.llama.itself = self.llama  # a cycle, which only the collector ends
        self.llama = engine(self.model, self.n_batch)
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

    def narrow(self, prompt, option):
        """Cells of one level serve all, so these are kept out of the other requests."""
        self.llama.reset()
        with elastic.level(NARROW), without("kv_chunks"):
            found = says(self.llama, prompt, option)
        self.llama.reset()
        return found


def drawn(rng, names):
    """Yield the operations, and for each request the plugin that alone says what it must say."""
    ways = ["ask"] * 6 + ["cancel", "abort", "collect", "drop", "restart"]
    ways += ["narrow"] * ("elastic" in names)
    for _ in range(N_STEPS):
        way, prompt = rng.choice(ways), rng.randrange(len(PROMPTS))
        option = rng.choice(list(OPTIONS))
        if way == "ask":
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
    """A datastore, and the conversations that drafts are taken from."""
    store = built(model, tmp_path_factory.mktemp("knn"))
    return {"store": str(store), "k": K, "look_back": 12}


@pytest.fixture(scope="module")
def alone(model, knn):
    """Return the answer of one plugin alone, or of vanilla; evaluated anew each time."""
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
        wanted = {one for one in wanted if one[2] in OPTIONS} - known.keys()
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
        "flash_weights": {"memory_budget": "64 GiB"},
        "elastic": {},
        "knn_lm": knn | {"drafts": rng.random() < 0.5},
    }
    asked = [step for step in steps if step[0] in {"ask", "narrow"}]
    expected = alone(asked, names)
    process = Process(model, {name: tables[name] for name in names})
    try:
        for i, (way, *given) in enumerate(steps):
            if way == "ask":
                *request, declined = given
                with without(*declined):
                    found = says(process.llama, *request)
            else:
                found = getattr(process, way)(*given)
            if way in {"ask", "narrow"}:
                kind = kind_of(steps[i], names)
                told = (
                    f"seed {seed}, {names}: step {i} of {steps[: i + 1]} says not what {kind} says"
                )
                assert found == expected[kind, *given[:2]], told
    finally:
        process.close()


@pytest.mark.soak
@pytest.mark.parametrize("names", COMBINATIONS, ids="+".join)
def test_together_they_say_what_one_alone_says(names, model, knn, alone, tmp_path):
    for seed in range(scale(2, 100)):
        check(names, seed, model, knn, alone, tmp_path)

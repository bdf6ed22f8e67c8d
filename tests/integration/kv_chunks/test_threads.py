"""Several engines in several threads on one suite: every context continues as in vanilla."""

from __future__ import annotations

import contextlib
import threading

import numpy as np
import pytest
from background import chunks_at_rest
from llama_cpp import Llama

from llmaas_hooks import serving_context
from llmaas_plugins import activate

RNG = np.random.default_rng(4)
SYSTEM = [1, *RNG.integers(300, 4000, 39).tolist()]
PROMPTS = {
    name: [*SYSTEM, *RNG.integers(300, 4000, 20 + 7 * i).tolist()] for i, name in enumerate("abcd")
}
TURNS = 2


def answer(llama, tokens, n=5):
    generator = llama.generate(tokens, temp=0.0)
    found = [next(generator) for _ in range(n)]
    generator.close()
    return found


def talk(llama, names, texts):
    """Run a few turns with each context in turn; return the whole text of each."""
    for turn in range(TURNS):
        for name in names:
            with serving_context(name):
                texts[name] += [*answer(llama, texts[name]), 500 + turn]


@pytest.fixture(scope="module")
def expected(reference_model):
    """Return vanilla's text of each context with nothing in between."""
    texts = {name: list(prompt) for name, prompt in PROMPTS.items()}
    settings = {"n_ctx": 256, "verbose": False, "n_threads": 1, "n_threads_batch": 1}
    with contextlib.closing(Llama(str(reference_model), **settings)) as llama:
        for name in PROMPTS:
            talk(llama, [name], texts)
    return texts


@pytest.mark.parametrize("budget", ["1 MiB", "64 MiB"])
@pytest.mark.parametrize("is_same", [False, True], ids=["own contexts", "same contexts"])
def test_two_engines_in_two_threads(make, tmp_path, expected, budget, is_same):
    table = {"codec": "lossless", "ram_budget": budget, "store": str(tmp_path / "kv")}
    with activate({"on_error": "raise", "plugins": {"kv_chunks": table}}) as suite:
        names = [list("abcd")] * 2 if is_same else [["a", "b"], ["c", "d"]]
        found = [{name: list(PROMPTS[name]) for name in mine} for mine in names]
        llamas = [make(), make()]
        problems = []

        def work(i):
            try:
                talk(llamas[i], names[i], found[i])
            except Exception as error:
                problems.append(error)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert problems == []
        for texts in found:
            assert texts == {name: expected[name] for name in texts}
        store = chunks_at_rest(suite)
        assert all(chunk.pins == 0 for chunk in store.tree)
        assert set(store.tree.contexts()) == set(PROMPTS)
        report = suite.status()["plugins"]["kv_chunks"]
        assert report["restores"] > 0
        assert (report["faults"], report["io_errors"]) == (0, 0)
        for llama in llamas:
            llama.close()


def test_first_engines_made_at_the_same_time(make, tmp_path):
    table = {"codec": "lossless", "store": str(tmp_path / "kv")}
    with activate({"on_error": "raise", "plugins": {"kv_chunks": table}}) as suite:
        together, llamas = threading.Barrier(4), []

        def work():
            together.wait()
            llamas.append(make())

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for llama in llamas:
            answer(llama, PROMPTS["a"], 1)
            llama.close()
        report = suite.status()["plugins"]["kv_chunks"]
    assert report["left_alone"] == []
    assert (report["saves"], report["restores"]) == (4, 3)


def test_suite_goes_while_engines_work(make, tmp_path, expected):
    """Deactivating between two requests of a busy engine loses nothing but time."""
    config = {"plugins": {"kv_chunks": {"codec": "lossless", "store": str(tmp_path / "kv")}}}
    found = {name: list(prompt) for name, prompt in PROMPTS.items()}
    with contextlib.ExitStack() as stack:
        stack.enter_context(activate(config))
        llama = make()
        thread = threading.Thread(target=talk, args=(llama, list("abcd"), found))
        thread.start()
        while len(found["b"]) == len(PROMPTS["b"]):
            threading.Event().wait(0.01)
        stack.close()
        thread.join()
    assert found == expected

"""Trust where cells are restored: nothing is evaluated again, and the trust is the same."""

from __future__ import annotations

import contextlib
import threading

import pytest
from datastores import QUESTIONS, stored
from mixed_requests import ONE_BY_ONE

import llmaas_plugins
from llmaas_hooks import PluginError, hookimpl, serving_context
from llmaas_plugins.knn_lm.archive.files import EVIDENCE, SELECTED
from llmaas_plugins.knn_lm.datastore.datastore import Datastore
from llmaas_plugins.knn_lm.mixing.evidence import Evidence
from llmaas_plugins.knn_lm.mixing.judgment import Judgment
from llmaas_plugins.kv_chunks.store.chunk_ids import CHUNK_TOKENS
from llmaas_plugins.service import LLMService, ServiceConfig

LOOK_BACK = 48
PRIOR = 0.25
LONG = "Anna wrote to Bruno in the winter, and Bruno wrote back from the boat. " * 3
FIRST = f"{LONG}User: {QUESTIONS[1]}\nAssistant: At seven.\nUser: {QUESTIONS[0]}\nAssistant:"
OTHER = f"{LONG[::-1]}User: {QUESTIONS[2]}\nAssistant:"
NEXT = "\nUser: Who feeds Bruno?\nAssistant:"
N_SAID = 12


class Work:
    """Plugin that counts evaluated tokens."""

    n_tokens = 0

    @hookimpl
    def llmaas_decode(self, step):
        self.n_tokens += step.n_tokens


class Talk:
    """An engine with knn_lm and kv_chunks, in whose contexts apps talk."""

    def __init__(self, suite, llama, work):
        self.suite, self.llama, self.work = suite, llama, work

    @property
    def mixer(self):
        return self.suite.plugin("knn_lm")._served[int(self.llama.ctx)].mixer

    def say(self, prompt, name=None, n=N_SAID, app="app"):
        """Return answer, trust, and the number of tokens evaluated for the first token."""
        with serving_context(name, app):
            stream, before = self.llama.generate(prompt, temp=0.0), self.work.n_tokens
            found = [next(stream)]
            n_evaluated = self.work.n_tokens - before
            weight = self.mixer._judgment.trust.weight
            found += [next(stream) for _ in range(n - 1)]
            stream.close()
        return found, weight, n_evaluated

    def report(self):
        return self.suite.status()["plugins"]["knn_lm"]


@pytest.fixture
def texts(make):
    """Return the tokens of all prompts and questions, by name."""
    with contextlib.closing(make()) as llama:
        return {
            name: llama.tokenize(text.encode(), add_bos=name in {"first", "other"}, special=True)
            for name, text in {"first": FIRST, "other": OTHER, "next": NEXT}.items()
        }


@pytest.fixture
def talking(make, mixing, tmp_path):
    """Return a context manager: a process's life with the store and kv_chunks, or without."""

    @contextlib.contextmanager
    def start(restores=True, **table):
        kv = {"kv_chunks": {"store": str(tmp_path / "kv"), "codec": "lossless"}}
        work = Work()
        own = {"look_back": LOOK_BACK, "plugins": kv if restores else {}} | table
        with mixing(work, **own) as suite, contextlib.closing(make(**ONE_BY_ONE)) as llama:
            yield Talk(suite, llama, work)

    return start


@pytest.fixture
def evaluated(talking, store):
    """Return a function from a prompt to what an engine says that evaluates all of it."""

    def ask(prompt):
        (store / EVIDENCE).unlink(missing_ok=True)
        with talking(restores=False) as talk:
            found = talk.say(prompt)
        (store / EVIDENCE).unlink(missing_ok=True)
        return found

    return ask


@pytest.mark.parametrize("restarts", [False, True], ids=["RAM", "disk"])
def test_a_restored_context_has_its_trust_without_evaluation(talking, evaluated, texts, restarts):
    with talking() as talk:
        answer = talk.say(texts["first"], "one")[0]
        prompt = texts["first"] + answer + texts["next"]
        talk.say(texts["other"], "two")
        if not restarts:
            found = talk.say(prompt, "one")
    if restarts:
        with talking() as talk:
            found = talk.say(prompt, "one")
    said, weight, n_evaluated = evaluated(prompt)
    assert n_evaluated == len(prompt)
    assert found[2] <= len(texts["next"]) + 1 < LOOK_BACK
    assert found[0] == said
    assert found[1] == pytest.approx(weight, rel=1e-4) != PRIOR


def test_the_same_prompt_is_trusted_as_much_again(talking, evaluated, texts):
    with talking() as talk:
        first = talk.say(texts["first"], "one")
        talk.say(texts["other"], "two")
        assert talk.say(texts["first"], "one")[:2] == first[:2]
    with talking() as talk:
        again = talk.say(texts["first"], "one")
    assert again[:2] == first[:2] == evaluated(texts["first"])[:2]
    assert again[2] <= CHUNK_TOKENS


def test_contexts_that_begin_alike_share_what_is_known(talking, evaluated, texts):
    prompt = texts["first"] + texts["next"][:5] + texts["next"]
    with talking() as talk:
        talk.say(texts["first"], "one")
        talk.say(texts["other"], "two")
        found = talk.say(prompt, "three")
    assert found[2] <= 5 + len(texts["next"]) + CHUNK_TOKENS < LOOK_BACK
    said, weight, _ = evaluated(prompt)
    assert (found[0], found[1]) == (said, pytest.approx(weight, rel=1e-4))


@pytest.mark.parametrize("change", ["another datastore", "a setting", "not mixed before"])
def test_where_little_is_known_that_little_counts(  # noqa: PLR0917  fixtures
    talking, evaluated, texts, store, pairs, change
):
    """Nothing that is restored is evaluated for it, and only what is evaluated is judged."""
    declined = ("knn_lm",) if change == "not mixed before" else ()
    with talking() as talk, llmaas_plugins.without(*declined):
        list(zip(range(N_SAID), talk.llama.generate(texts["first"], temp=0.0), strict=False))
    if change == "another datastore":
        pairs.write(store, rows=pairs.origins[:, 0] != 2)
    prompt, n_new = texts["first"] + texts["next"], len(texts["next"])
    table = {"alpha": 0.5} if change == "a setting" else {}
    with talking(**table) as talk:
        _, weight, n_evaluated = talk.say(prompt, app=None)
        judgment = talk.mixer._judgment._on_prompt
        assert len(judgment.missing) >= LOOK_BACK - 1 - n_evaluated > 0
    assert n_new <= n_evaluated <= n_new + CHUNK_TOKENS
    assert weight != pytest.approx(evaluated(prompt)[1], rel=1e-3)


def test_nothing_is_left_of_a_context_that_is_erased(talking, store, evaluated, texts):
    with talking() as talk:
        talk.say(texts["first"], "context-one")
        talk.say(texts["other"], "context-two")
        n_before = talk.report()["remembered_gains"]
    assert b"context-one" in (store / EVIDENCE).read_bytes()
    prompt = texts["first"] + texts["next"]
    with talking() as talk:
        talk.suite.evict("context-one")  # before anything was read
        assert b"context-one" not in (store / EVIDENCE).read_bytes()
        talk.say(texts["other"], "context-two", n=1)
        assert LOOK_BACK <= talk.report()["remembered_gains"] <= n_before - LOOK_BACK
        found = talk.say(prompt, "context-three")
        talk.suite.evict("context-three")
        talk.suite.evict("context-two")
        assert talk.report()["remembered_gains"] == 0
    assert found[:2] == evaluated(prompt)[:2]
    assert found[2] > LOOK_BACK  # its cells were erased, too


def test_a_request_in_an_erased_context_leaves_nothing(talking, store, texts):
    with talking() as talk:
        talk.say(texts["other"], "context-two")
        n_before = talk.report()["remembered_gains"]
        with serving_context("context-one", "app"):
            stream = talk.llama.generate(texts["first"], temp=0.0)
            next(stream), next(stream)
            talk.suite.evict("context-one")
            next(stream)
            stream.close()
        assert talk.report()["remembered_gains"] == n_before
    assert b"context-one" not in (store / EVIDENCE).read_bytes()


def test_a_request_that_ends_while_its_context_is_erased_leaves_nothing(
    talking, store, texts, monkeypatch
):
    end = Judgment.end

    def end_late(judgment):
        """End after another thread erased the context."""
        erasing = threading.Thread(target=plugin.llmaas_kv_evict, args=("context-one",))
        erasing.start()
        erasing.join()
        end(judgment)

    with talking(restores=False) as talk:
        plugin = talk.suite.plugin("knn_lm")
        monkeypatch.setattr(Judgment, "end", end_late)
        talk.say(texts["first"], "context-one")
        assert talk.report()["remembered_gains"] == 0
    assert not (store / EVIDENCE).exists()


def test_a_request_whose_judgment_fails_at_the_end_has_ended(talking, texts, monkeypatch):
    def fail(_):
        raise ZeroDivisionError

    with talking(restores=False, learn=True) as talk:
        plugin = talk.suite.plugin("knn_lm")
        with monkeypatch.context() as patch:
            patch.setattr(Judgment, "end", fail)
            with pytest.raises(PluginError):
                talk.say(texts["first"], "one")
            assert not plugin._learner._busy[int(talk.llama.ctx)]
        assert talk.mixer._source is None
        assert not plugin._interruptible


def test_gains_of_forgotten_pairs_are_not_written(talking, store, pairs, texts):
    with talking(restores=False) as talk:
        talk.say(texts["first"], "context-one")
        pairs.write(store, rows=pairs.origins[:, 0] != 2)  # as `llmaas datastore forget` does
        with llmaas_plugins.without("knn_lm"):
            next(talk.llama.generate(texts["other"], temp=0.0))
        assert talk.report()["pairs"] < len(pairs.values)  # the new ones are open
    assert not (store / EVIDENCE).exists()


def test_a_request_that_began_before_pairs_were_forgotten_leaves_nothing(
    talking, make, pairs, store, texts
):
    with talking(restores=False) as talk, contextlib.closing(make(**ONE_BY_ONE)) as other:
        stream = other.generate(texts["first"], temp=0.0)
        next(stream)
        pairs.write(store, rows=pairs.origins[:, 0] != 2)
        talk.say(texts["other"], n=1)
        n_before = talk.report()["remembered_gains"]
        next(stream)
        stream.close()
        assert talk.report()["remembered_gains"] == n_before > 0


@pytest.mark.parametrize("ends_first", [False, True], ids=["goes on", "ends"])
def test_a_request_that_began_with_keys_of_another_kind_leaves_nothing(  # noqa: PLR0917  fixtures
    talking, make, reference_model, store, texts, ends_first
):
    others = stored(reference_model, "final_norm")
    with talking(restores=False) as talk, contextlib.closing(make(**ONE_BY_ONE)) as other:
        stream = other.generate(texts["first"], temp=0.0)
        next(stream)
        others.write(store)
        if ends_first:
            stream.close()
        talk.say(texts["other"], n=1)
        n_before = talk.report()["remembered_gains"]
        if not ends_first:
            next(stream)
            stream.close()
        assert talk.report()["key"] == "final_norm"
        assert talk.report()["remembered_gains"] == n_before > 0
        talk.say(texts["other"], n=1)
    evidence = Evidence(store / EVIDENCE)
    with contextlib.closing(Datastore.open(store / SELECTED, None)) as datastore:
        assert evidence.bind(datastore.digest)
    assert len(evidence) == n_before


def test_apps_do_not_learn_what_is_known_of_others_texts(talking, texts):
    with talking(restores=False) as talk:
        counts = []
        for app in ("one", "two"):
            talk.say(texts["first"], app=app)
            counts.append(talk.report()["remembered_gains"])
        talk.say(texts["first"], app="two")
        assert counts[1] == talk.report()["remembered_gains"] == 2 * counts[0]


def test_a_service_without_stored_cells_erases_what_is_known_of_a_context(talking, tmp_path):
    with (
        talking(restores=False) as talk,
        contextlib.closing(
            LLMService(talk.llama, ServiceConfig(state_dir=tmp_path / "state"))
        ) as service,
    ):
        context = service.bind("mail").new_context()
        context.call(QUESTIONS[0], max_tokens=4)
        assert talk.report()["remembered_gains"] > 0
        context.delete()
        assert talk.report()["remembered_gains"] == 0

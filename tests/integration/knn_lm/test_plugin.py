"""knn_lm from activation to shutdown: its answers, its refusals, and its reports of both."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import itertools
import re
import threading
import weakref
from pathlib import Path

import pytest
from datastores import CONVERSATIONS, ENGINE, MIXTURE, QUESTIONS, K, Natives, stored
from llama_cpp import Llama, llama_cpp
from served import wait_until
from soak import scale

from llmaas_eval.families import write_family, write_lora
from llmaas_hooks import PluginError, StoreError
from llmaas_plugins import activate, without
from llmaas_plugins.knn_lm.archive.archive import Archive
from llmaas_plugins.knn_lm.archive.files import SELECTED
from llmaas_plugins.knn_lm.build.encoder import Encoder
from llmaas_plugins.knn_lm.build.inbox import remember
from llmaas_plugins.knn_lm.build.ingest import add_conversations, binding_of
from llmaas_plugins.knn_lm.datastore.datastore import Datastore

QUESTION = QUESTIONS[0]
FIRST = CONVERSATIONS[0].title


class Store:
    """A store directory, and a writer of its files."""

    def __init__(self, directory, pairs):
        self.directory, self.pairs = directory, pairs
        self.file = directory / SELECTED

    def write(self, pairs=None, **settings):
        """Write the datastore, optionally with other pairs or settings."""
        (self.pairs if pairs is None else pairs).write(self.directory, **settings)

    def links(self):
        """Return the store's files that this process has open."""
        found = []
        for link in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):
                found.append(str(link.readlink()))
        return [path for path in found if path.startswith(str(self.directory))]

    def activate(self, on_error="raise", **table):
        own = {"store": str(self.directory), "k": K, "look_back": 0} | table
        return activate({"on_error": on_error, "plugins": {"knn_lm": own}})


def ask(llama, question=QUESTION, n=8):
    """Return the next tokens, from an engine that starts anew."""
    llama.reset()
    stream = begin(llama, question)
    found = list(itertools.islice(stream, n))
    stream.close()
    return found


def begin(llama, question=QUESTION):
    prompt = llama.tokenize(f"User: {question}\nAssistant:".encode(), special=True)
    return llama.generate(prompt, temp=0.0)


def report(suite):
    return suite.status()["plugins"]["knn_lm"]


@pytest.fixture(scope="module")
def pairs(reference_model):
    return stored(reference_model)


def replies(model):
    with contextlib.closing(Llama(str(model), **ENGINE)) as llama:
        return {question: ask(llama, question) for question in QUESTIONS}


@pytest.fixture(scope="module")
def alone(reference_model):
    """Return the model's own answer to each question."""
    return replies(reference_model)


@pytest.fixture(scope="module")
def mixed(reference_model, pairs, alone, tmp_path_factory):
    """Return the answers with all pairs."""
    store = Store(tmp_path_factory.mktemp("knn"), pairs)
    store.write()
    with store.activate():
        found = replies(reference_model)
    assert found[QUESTION] != alone[QUESTION]
    return found


@pytest.fixture
def store(tmp_path, pairs):
    """Return a store that has no datastore yet."""
    return Store(tmp_path / "knn", pairs)


@pytest.fixture
def active(store):
    """Return a function that activates with the store."""
    with contextlib.ExitStack() as stack:
        yield lambda *args, **table: stack.enter_context(store.activate(*args, **table))


class TestStatus:
    def test_before_and_after_the_first_request(self, store, active, make):
        store.write()
        suite = active()
        before = report(suite)
        assert (before["pairs"], before["memory_bytes"], before["mixture"]) == (None, 0, None)
        ask(make())
        after = report(suite)
        assert after["datastore"] == str(store.file)
        assert after["pairs"] == len(store.pairs.keys)
        assert after["memory_bytes"] > store.pairs.keys.size
        assert (after["key"], after["mixture"]) == ("ffn_input", MIXTURE.as_json())
        assert (after["mixed"], after["skipped"], after["unmatched"]) == (8, 0, 0)
        assert after["search_s"] > 0
        assert after["left_alone"] == {}

    def test_settings_of_the_configuration_come_first(self, store, active, make, alone):
        store.write(skip_above=0.5)
        suite = active(alpha=0.0, beta=1.0, skip_above=0.9, k=3)
        assert ask(make()) == alone[QUESTION]
        found = report(suite)
        assert found["mixture"] == MIXTURE.as_json() | {"alpha": 0.0, "beta": 1.0}
        assert (found["skip_above"], found["k"]) == (0.9, 3)

    @pytest.mark.parametrize("look_back", [0, 32])
    def test_neighbors_that_leave_the_model_no_say(self, store, active, make, look_back):
        """Nothing divides by zero, also when a prompt is judged."""
        store.write(mixture=anywhere(alpha=1.0, beta=0.0))
        suite = active(look_back=look_back)
        assert len(ask(make(), " ".join(QUESTIONS))) == 8
        found = report(suite)
        counted = "distrusted" if look_back else "mixed"
        assert found[counted] == 8

    def test_a_datastore_says_which_hidden_states_it_holds(
        self, reference_model, store, active, make
    ):
        norms = stored(reference_model, "final_norm")
        store.write(norms, mixture=anywhere(alpha=1.0, beta=0.0))
        suite = active(key="ffn_input", k=1)
        llama = make()
        text = llama.detokenize(ask(llama, n=12), special=True).decode()
        assert text.strip().startswith("Bruno sleeps in the old boat")  # as it was stored
        assert report(suite)["key"] == "final_norm"


def anywhere(alpha=0.7, beta=0.25, theta=1e4, far=None):
    """Return a mixture in which neighbors count at any distance."""
    return {"alpha": alpha, "beta": beta, "theta": theta, "far": far}


class TestLeftAlone:
    """Cases that give vanilla's text, one warning, and the reason in the status."""

    @pytest.fixture
    def reason(self, caplog):
        def reason(suite):
            (reason,) = report(suite)["left_alone"].values()
            warnings = [r.getMessage() for r in caplog.records if r.name == "llmaas.knn_lm"]
            assert len(warnings) == 1
            assert warnings[0].startswith("knn_lm leaves reference")
            assert reason in warnings[0]
            return reason

        return reason

    def test_without_a_datastore(self, store, active, make, alone, reason):
        suite = active()
        llama = make()
        assert {question: ask(llama, question) for question in QUESTIONS} == alone
        assert f"there is no datastore in {store.directory}. Make one" in reason(suite)
        assert report(suite)["mixed"] == 0
        assert not store.directory.exists()

    def test_an_engine_that_is_older_than_the_activation(self, store, active, make, alone, reason):
        store.write()
        llama = make()
        suite = active()
        assert {question: ask(llama, question) for question in QUESTIONS} == alone
        assert "made before the activation" in reason(suite)
        assert ask(make()) != alone[QUESTION]
        assert report(suite)["left_alone"] == {}

    def test_an_engine_that_the_app_bends(self, store, active, make, alone, reason):
        """The plugin must assume other hidden states from then on; here the vector is zero."""
        store.write()
        suite = active()
        llama = make()
        assert ask(llama) != alone[QUESTION]
        n_embd, n_layers, n_mixed = llama.n_embd(), 8, report(suite)["mixed"]
        nothing = (ctypes.c_float * (n_embd * n_layers))()
        size = len(nothing)
        llama_cpp.llama_set_adapter_cvec(llama.ctx, nothing, size, n_embd, 1, n_layers)
        assert {question: ask(llama, question) for question in QUESTIONS} == alone
        assert "the app called llama_set_adapter_cvec" in reason(suite)
        assert report(suite)["mixed"] == n_mixed


class TestRefusal:
    """With ``raise`` every request gives the reason; with ``log`` one line does."""

    @pytest.fixture(params=["raise", "log"])
    def refused(self, request, active, make, alone, caplog):
        """Return a function that checks the refusal of the datastore and its reason."""

        def raises(llama, match):
            with pytest.raises(PluginError, match=match) as caught:
                ask(llama)
            assert isinstance(caught.value.__cause__, StoreError)
            assert caplog.records == []

        def logs(llama, match):
            (record,) = caplog.records
            assert re.search(match, record.getMessage())
            assert record.levelname == "ERROR"

        def check(match, **engine):
            suite = active(request.param)
            llama = make(**engine)
            for question in QUESTIONS[:2]:
                if request.param == "raise":
                    raises(llama, match)
                else:
                    found = ask(llama, question)
                    assert engine or found == alone[question]
                    logs(llama, match)
            (reason,) = report(suite)["left_alone"].values()
            assert re.search(match, reason)
            assert report(suite)["mixed"] == 0

        return check

    @pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.999])
    def test_a_torn_datastore(self, store, refused, share):
        store.write()
        whole = store.file.read_bytes()
        store.file.write_bytes(whole[: int(len(whole) * share)])
        refused(r"found (another kind of file|[\d,]+ bytes)")

    @pytest.mark.parametrize("at", [20, 4096 + 3, 8192 + 3])
    def test_a_damaged_datastore(self, store, refused, at):
        store.write()
        data = bytearray(store.file.read_bytes())
        data[at] ^= 1
        store.file.write_bytes(data)
        refused("found (a )?damaged")

    def test_a_file_of_another_kind(self, store, refused):
        store.directory.mkdir()
        store.file.write_text("something else")
        refused("found another kind of file")

    def test_a_directory_in_its_place(self, store, refused):
        store.file.mkdir(parents=True)
        refused(SELECTED)

    def test_a_datastore_of_another_model(self, store, refused):
        store.write(dataclasses.replace(store.pairs, fingerprint=b"f" * 32))
        refused(r"belongs to another model.*: found fingerprint .*\. Set plugins\.knn_lm\.store to")

    @pytest.mark.parametrize(
        "engine",
        [
            {"rope_freq_base": 20_000.0},
            {"kv_overrides": {"llama.attention.layer_norm_rms_epsilon": 1e-3}},
        ],
        ids=str,
    )
    def test_a_datastore_of_the_model_used_in_another_way(self, store, refused, engine):
        store.write()
        refused("belongs to another model", **engine)

    @pytest.mark.parametrize(
        "settings",
        [
            {"mixture": None},
            {"mixture": ["alpha", "beta", "theta", "far"]},
            {"mixture": anywhere(alpha=2.0)},
            {"mixture": anywhere(beta=-1.0)},
            {"mixture": anywhere(theta=0.0)},
            {"mixture": anywhere(theta=1e-300)},
            {"mixture": anywhere(theta=1e300)},
            {"mixture": anywhere(theta="much")},
            {"mixture": anywhere(far=-1e300)},
            {"skip_above": None},
            {"skip_above": [1]},
            {"skip_above": "often"},
            {"skip_above": "nan"},
            {"skip_above": 1.5},
            {"key": "attention"},
            {"key": ["ffn_input"]},
        ],
        ids=str,
    )
    def test_settings_that_mean_nothing(self, store, refused, settings):
        store.write(**settings)
        refused("has unusable settings: .* Select it again")

    def test_tokens_that_the_model_has_not(self, store, refused):
        values = store.pairs.values.copy()
        values[7] = 4096
        store.write(dataclasses.replace(store.pairs, values=values))
        refused("does not fit this model: found keys of 256 numbers and token 4096")

    def test_keys_of_another_size(self, store, refused):
        keys = store.pairs.keys[:, :128].copy()
        store.write(dataclasses.replace(store.pairs, keys=keys))
        refused("does not fit this model: found keys of 128 numbers")

    def test_a_datastore_that_is_repaired(self, store, active, make, mixed):
        store.write()
        store.file.write_bytes(b"torn")
        suite = active()
        llama = make()
        with pytest.raises(PluginError, match="found another kind of file"):
            ask(llama)
        store.write()
        assert ask(llama) == mixed[QUESTION]
        assert report(suite)["left_alone"] == {}

    def test_keys_that_go_bad_later(self, store, active, make, mixed):
        """Keys are checked when they are read: one error, and one token of the model's own."""
        store.write()
        suite = active("log")
        llama = make()
        assert ask(llama) == mixed[QUESTION]
        with store.file.open("r+b") as file:
            file.seek(-store.pairs.keys.nbytes, 2)
            file.write(bytes(store.pairs.keys.nbytes))
        ask(llama, n=4)
        assert suite.hooks.errors()["knn_lm"]["llmaas_logits"]["count"] == 4

    def test_adapters_of_one_model_are_told_apart(self, tmp_path, store, active):
        model = write_family("llama", tmp_path / "llama.gguf")
        lora = write_lora("llama", tmp_path / "lora.gguf")
        plain, adapted = stored(model), stored(model, lora=lora)
        store.write(plain)
        suite = active()

        def ask_with(**more):
            with contextlib.closing(Llama(str(model), **ENGINE, **more)) as llama:
                return ask(llama)

        ask_with()
        assert report(suite)["mixed"] == 8
        for more in ({}, {"lora_scale": 0.5}):
            with pytest.raises(PluginError, match="belongs to another model"):
                ask_with(lora_path=str(lora), **more)
        store.write(adapted)
        with pytest.raises(PluginError, match="belongs to another model"):
            ask_with()
        ask_with(lora_path=str(lora))
        assert report(suite)["mixed"] == 16


def n_outputs(llama):
    """Return the number of a prompt's logit rows."""
    llama.reset()
    next(begin(llama, " ".join(QUESTIONS)))
    return sum(bool(llama._batch.batch.logits[i]) for i in range(llama.n_tokens))


class TestReplacement:
    """Datastores replaced while the process runs: the next request uses the current one."""

    def test_a_datastore_that_is_selected_again(self, store, active, make, mixed):
        store.write(mixture=anywhere(alpha=0.0))
        suite = active()
        llama = make()
        assert ask(llama) != mixed[QUESTION]
        store.write()
        assert ask(llama) == mixed[QUESTION]
        assert report(suite)["left_alone"] == {}

    def test_a_datastore_that_comes_and_goes(self, store, active, make, mixed):
        suite = active()
        llama = make()
        vanilla = ask(llama)
        store.write()
        assert ask(llama) == mixed[QUESTION]
        assert report(suite)["left_alone"] == {}
        store.file.unlink()
        assert ask(llama) == vanilla
        assert "there is no datastore" in str(report(suite)["left_alone"])
        assert (report(suite)["pairs"], report(suite)["memory_bytes"]) == (None, 0)

    def test_a_conversation_that_is_forgotten(self, store, active, make, mixed):
        store.write()
        suite = active()
        llama = make()
        assert ask(llama) == mixed[QUESTION]
        is_left = store.pairs.origins[:, 0] != 0
        assert Datastore.without(store.file, [FIRST]) == (~is_left).sum()
        forgetful = ask(llama)
        assert forgetful != mixed[QUESTION]
        assert report(suite)["pairs"] == is_left.sum()
        store.write(rows=is_left)
        assert ask(make()) == forgetful

    @pytest.mark.parametrize("is_forgotten", [False, True], ids=["replaced", "forgotten"])
    def test_a_request_that_is_under_way(self, store, active, make, mixed, is_forgotten):
        """The request continues with its datastore, or without it once that is gone."""
        store.write()
        suite = active()
        llama = make()
        ask(llama)
        stream = begin(llama)
        found = list(itertools.islice(stream, 4))
        if is_forgotten:
            Datastore.without(store.file, [FIRST])
        else:
            store.write()
        found += itertools.islice(stream, 4)
        stream.close()
        assert (found == mixed[QUESTION]) == (not is_forgotten)
        assert found[:4] == mixed[QUESTION][:4]
        assert suite.hooks.errors() == {}
        store.write()
        assert ask(llama) == mixed[QUESTION]

    def test_an_engine_is_left_as_it_was(self, store, active, make, alone):
        """The engine no longer outputs the extra rows that judged prompts."""
        store.write()
        active(look_back=32)
        llama = make()
        assert ask(llama) != alone[QUESTION]
        assert n_outputs(llama) == 32
        store.file.unlink()
        assert ask(llama) == alone[QUESTION]
        assert n_outputs(llama) == 1

    @pytest.mark.parametrize(("swa_full", "n"), [(True, 32), (False, 1)])
    def test_tokens_are_not_evaluated_again_where_their_window_is_gone(
        self, tmp_path, store, active, swa_full, n
    ):
        model = write_family("gemma3", tmp_path / "gemma3.gguf")
        store.write(stored(model))
        active(look_back=32)
        with contextlib.closing(Llama(str(model), **ENGINE, swa_full=swa_full)) as llama:
            assert n_outputs(llama) == n

    def test_files_that_were_replaced_are_closed(self, store, active, make):
        store.write()
        suite = active()
        llama = make()
        for _ in range(3):
            store.write()
            ask(llama)
            assert store.links() == [str(store.file)]
        suite.deactivate()
        assert store.links() == []


class TestLearning:
    def test_a_request_that_was_refused_keeps_no_engine_busy(self, store, active, make):
        """Such a request has no end; when the next one ends, waiting chats are learned and used."""
        store.write()
        store.file.write_bytes(b"torn")
        suite = active(learn=True, idle_s=0.05, drafts=True)
        llama = make()
        with pytest.raises(PluginError, match="found another kind of file"):
            ask(llama)
        store.file.unlink()
        ask(llama)
        for one in CONVERSATIONS:
            remember(store.directory, one.messages, title=one.title)
        wait_until(store.file.exists)
        assert report(suite)["learned"] == len(CONVERSATIONS)
        ask(llama, n=24)
        assert report(suite)["pairs"] == len(store.pairs.keys)
        assert report(suite)["mixed"] > 0
        assert report(suite)["proposed"] > 0
        assert report(suite)["learning_error"] is None


class TestEngines:
    def test_hidden_states_of_a_batch_that_failed(self, store, active, make):
        """Those states precede the next batch's states, and belong to none of its logits."""
        store.write()
        suite = active()
        settings = {"n_ubatch": 4, "logits_all": True}
        expected = ask(make(**settings))
        llama = make(**settings)
        n_left = itertools.count(0, 0)

        @llama_cpp.ggml_abort_callback
        def is_over(_):
            return next(n_left) < 0

        llama_cpp.llama_set_abort_callback(llama.ctx, is_over, None)
        assert ask(llama) == expected
        n_calls = itertools.count()
        n_left = n_calls
        ask(llama, n=1)
        n_calls = next(n_calls)
        for share in (0.3, 0.6, 0.9):
            n_left = itertools.count(int(n_calls * share), -1)
            with pytest.raises(RuntimeError, match="llama_decode returned 2"):
                ask(llama, n=1)
            n_left = itertools.count(0, 0)
            assert ask(llama) == expected
        assert report(suite)["unmatched"] == 0

    def test_engines_that_come_and_go(self, store, active, reference_model, mixed):
        store.write()
        suite = active(learn=True)
        for _ in range(3):
            llama = Llama(str(reference_model), **ENGINE)
            assert ask(llama) == mixed[QUESTION]
            engine = weakref.ref(llama)
            del llama
            assert engine() is None
        assert report(suite)["left_alone"] == {}

    def test_two_threads_and_one_datastore(self, store, active, make, mixed):
        """The datastore is selected again and again meanwhile."""
        store.write()
        suite = active()
        llamas = [make(), make()]
        found, problems = [[], []], []
        is_over = threading.Event()

        def work(i):
            try:
                for question in QUESTIONS * scale(2, 40):
                    found[i].append(ask(llamas[i], question))
            except Exception as error:
                problems.append(error)

        def replace():
            while not is_over.wait(0.005):
                store.pairs.select(store.directory)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
        replacing = threading.Thread(target=replace)
        for thread in (*threads, replacing):
            thread.start()
        for thread in threads:
            thread.join()
        is_over.set()
        replacing.join()
        assert problems == []
        expected = [mixed[question] for question in QUESTIONS]
        assert found == [expected * scale(2, 40)] * 2
        assert report(suite)["unmatched"] == 0


class TestDrafts:
    """Drafts from the archive beside the datastore: fewer batches and the same text."""

    @pytest.fixture
    def archive(self, store, reference_model):
        """Add conversations to the archive as the commands do."""

        def archive(conversations, model=reference_model):
            natives = Natives()
            with (
                activate({"on_error": "raise", "plugins": {}}, {"natives": natives}),
                contextlib.closing(Llama(str(model), **ENGINE)) as llama,
                Encoder(llama, natives.by_ctx, "ffn_input") as encoder,
                Archive.open(
                    store.directory, binding_of(llama, "ffn_input"), writable=True
                ) as archive,
            ):
                add_conversations(
                    archive, llama, encoder, ((one, "export.json") for one in conversations)
                )

        return archive

    @pytest.mark.parametrize("mixes", [True, False])
    def test_text_is_the_same(self, archive, store, make, mixes):
        archive(CONVERSATIONS)
        store.write()
        found = []
        for drafts in (False, True):
            with store.activate(mix=mixes, drafts=drafts) as suite:
                llama = make(n_ubatch=1)
                found.append([ask(llama, question, n=24) for question in QUESTIONS])
                status = report(suite)
                assert (status["mixed"] > 0) == mixes
                with without("knn_lm"):
                    alone = ask(llama)
                assert ("proposed" in status) == drafts
                if drafts:
                    assert report(suite)["proposed"] == status["proposed"] > 0
                    assert status["accepted"] > 0 or not mixes
                assert (alone != found[-1][0][:8]) == mixes
                suite.deactivate()
                assert llama.draft_model is None
                llama.close()
        assert found[0] == found[1]

    def test_an_archive_of_another_model_is_refused(self, archive, store, active, make, tmp_path):
        archive(CONVERSATIONS[:1], write_family("llama", tmp_path / "llama.gguf"))
        active(drafts=True, mix=False)
        llama = make()
        for _ in range(2):
            with pytest.raises(PluginError, match="were tokenized for another model"):
                ask(llama)
        assert llama.draft_model is None

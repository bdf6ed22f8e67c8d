"""knn_lm from activation to shutdown: its answers, its reports, and what it leaves alone."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import threading
import weakref

import pytest
from datastores import CONVERSATIONS, ENGINE, MIXTURE, QUESTIONS, Natives, stored
from families import write_family
from knn_stores import QUESTION, anywhere, ask, report
from llama_cpp import Llama, llama_cpp
from served import wait_until
from soak import scale

from llmaas_hooks import PluginError
from llmaas_plugins import activate, without
from llmaas_plugins.knn_lm.archive.archive import Archive
from llmaas_plugins.knn_lm.build.encoder import Encoder
from llmaas_plugins.knn_lm.build.inbox import remember
from llmaas_plugins.knn_lm.build.ingest import add_conversations, binding_of


@pytest.fixture(scope="session")
def reference_model(packaged_model):
    """Return the packaged model, whose text the datastore changes."""
    return packaged_model


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


class TestLearning:
    @pytest.mark.slow
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

"""Drafts in a running app: the same text, proposed from the archive's current content."""

from __future__ import annotations

import contextlib
import itertools
import shutil
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from datastores import CONVERSATIONS, ENGINE, QUESTIONS, filling
from llama_cpp import Llama, LlamaGrammar, LogitsProcessorList, StoppingCriteriaList, llama_cpp
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

from llmaas_hooks import PluginError
from llmaas_plugins import activate, without
from llmaas_plugins.chats.exports import Conversation, Message
from llmaas_plugins.config import ServiceConfig
from llmaas_plugins.knn_lm.archive.archive import Archive
from llmaas_plugins.knn_lm.archive.segments import Binding
from llmaas_plugins.service import LLMService

N = 16
ONE_BY_ONE = {"n_ubatch": 1}  # uses the same kernels for every batch


@pytest.fixture(scope="session")
def reference_model(packaged_model):
    """Return the packaged model, which samples likely tokens, so that drafts are accepted."""
    return packaged_model


@pytest.fixture(scope="module")
def filled(tmp_path_factory, reference_model):
    """Return an archive of the model's own text, so that drafts are proposed and accepted."""
    with contextlib.closing(Llama(str(reference_model), **ENGINE, **ONE_BY_ONE)) as llama:
        said = {q: llama.detokenize(ask(llama, q)).decode() for q in QUESTIONS}
    chats = [
        Conversation(q, "chat", (Message("user", q), Message("assistant", said[q].strip())), True)
        for q in QUESTIONS
    ]
    folder = tmp_path_factory.mktemp("filled")
    fill(folder, reference_model, chats)
    return folder


@pytest.fixture
def store(filled, tmp_path):
    """Return a copy of the archive for one test."""
    return shutil.copytree(filled, tmp_path, dirs_exist_ok=True)


def fill(store, model, chats):
    with filling(model, store) as (_, add):
        add(chats)


@contextlib.contextmanager
def proposing(store, model, **llama):
    table = {"store": str(store), "drafts": True, "mix": False}
    with (
        activate({"on_error": "raise", "plugins": {"knn_lm": table}}) as suite,
        contextlib.closing(Llama(str(model), **ENGINE, **ONE_BY_ONE, **llama)) as engine,
    ):
        yield suite, engine


def ask(llama, question, n=N):
    llama.reset()
    prompt = llama.tokenize(f"User: {question}\nAssistant:".encode(), special=True)
    return list(itertools.islice(llama.generate(prompt, temp=0.0), n))


def counts(suite):
    found = suite.status()["plugins"]["knn_lm"]
    return found["proposed"], found["accepted"]


def draft_of(suite):
    """Return the only engine's draft model, which the engine has during requests alone."""
    (draft,) = suite.plugin("knn_lm")._drafts._all()
    return draft


def test_the_text_is_the_model_s_own_and_much_of_it_was_proposed(store, reference_model):
    with contextlib.closing(Llama(str(reference_model), **ENGINE, **ONE_BY_ONE)) as llama:
        vanilla = [ask(llama, question) for question in QUESTIONS]
    with proposing(store, reference_model) as (suite, llama):
        assert [ask(llama, question) for question in QUESTIONS] == vanilla
        proposed, accepted = counts(suite)
        assert proposed >= accepted > N
        assert suite.status()["plugins"]["knn_lm"]["mixed"] == 0


def test_a_model_that_was_replaced_since_it_was_loaded_is_proposed_nothing(
    store, reference_model, tmp_path, caplog
):
    """The archive belongs to the file now at the path; the loaded file is unknown."""
    path = tmp_path / "model.gguf"
    shutil.copyfile(reference_model, path)
    table = {"store": str(store), "drafts": True, "mix": False}
    with contextlib.closing(Llama(str(path), **ENGINE)) as llama:
        path.unlink()
        shutil.copyfile(reference_model, path)
        with activate({"on_error": "raise", "plugins": {"knn_lm": table}}) as suite:
            for question in QUESTIONS:
                ask(llama, question)
            assert counts(suite) == (0, 0)
            assert suite.plugin("knn_lm")._drafts._all() == []
    assert caplog.text.count("proposes nothing for model.gguf: its model was loaded before") == 1


def test_a_request_can_do_without(store, reference_model):
    with proposing(store, reference_model) as (suite, llama):
        with without("knn_lm"):
            alone = ask(llama, QUESTIONS[0])
        assert counts(suite) == (0, 0)
        assert ask(llama, QUESTIONS[0]) == alone
        assert counts(suite)[1] > 0


def test_what_is_forgotten_meanwhile_is_proposed_no_more(store, reference_model):
    with proposing(store, reference_model) as (suite, llama):
        ask(llama, QUESTIONS[0])
        assert counts(suite)[1] > 0
        with Archive.open(store, writable=True) as archive:
            archive.forget(archive.ids())
        ask(llama, QUESTIONS[0])
        assert draft_of(suite)._stored.sequences() == []


def test_what_is_added_meanwhile_is_proposed(tmp_path, store, reference_model):
    other = tmp_path / "other"
    fill(other, reference_model, CONVERSATIONS[:1])
    with Archive.open(store) as archive:
        records = [(id_, archive.tokens(id_)) for id_ in archive.ids()]
    with proposing(other, reference_model) as (suite, llama):
        ask(llama, QUESTIONS[1])
        n_before = draft_of(suite).n_bytes
        copy(store, other)
        ask(llama, QUESTIONS[1])
        assert draft_of(suite).n_bytes > n_before + sum(len(tokens) for _, tokens in records)


def copy(source, target):
    """Add one archive's conversations to another one."""
    from llmaas_plugins.knn_lm.archive.record import Record

    with Archive.open(source) as old, Archive.open(target, old.binding, writable=True) as new:
        first = 0
        for row in old.conversations():
            id_ = bytes.fromhex(row.id)
            numbers = np.arange(first, first + row.n_pairs)
            first += row.n_pairs
            talk = Conversation(row.title, row.app, old.messages(id_), row.is_shared)
            tokens, positions = old.tokens(id_), old.origin(numbers).positions
            new.append(Record(talk, "copy", 0.0, tokens, positions, old.pairs(numbers)))


def test_an_app_s_own_draft_model_stays(store, reference_model):
    own = LlamaPromptLookupDecoding()
    with proposing(store, reference_model, draft_model=own, logits_all=True) as (suite, llama):
        ask(llama, QUESTIONS[0])
        assert llama.draft_model is own
        assert counts(suite) == (0, 0)


def test_without_an_archive_nothing_is_proposed(tmp_path, reference_model):
    with proposing(tmp_path / "none", reference_model) as (suite, llama):
        assert len(ask(llama, QUESTIONS[0])) == N
        assert counts(suite) == (0, 0)


def test_tokens_of_another_model_are_refused(tmp_path, reference_model):
    with Archive.open(tmp_path, Binding(bytes(32), 256, "ffn_input"), writable=True) as archive:
        archive._segment_for(1, archive.binding)
    with (
        proposing(tmp_path, reference_model) as (_, llama),
        pytest.raises(PluginError, match="tokenized for another model"),
    ):
        ask(llama, QUESTIONS[0])


def test_where_the_app_reads_the_tokens_so_far_nothing_is_proposed(store, reference_model):
    """The app would see tokens that were never accepted."""

    def seen(llama, **given):
        lengths = []

        def processor(tokens, scores):
            lengths.append(len(tokens))
            return scores

        def criterion(tokens, _scores):
            lengths.append(len(tokens))
            return False

        for kind, reader in (
            ("logits_processor", LogitsProcessorList([processor])),
            ("stopping_criteria", StoppingCriteriaList([criterion])),
        ):
            llama.reset()
            prompt = f"User: {QUESTIONS[0]}\nAssistant:"
            reply = llama(prompt, max_tokens=N, temperature=0.0, **given | {kind: reader})
            lengths.append(reply["choices"][0]["text"])
        return lengths

    with contextlib.closing(Llama(str(reference_model), **ENGINE, **ONE_BY_ONE)) as llama:
        vanilla = seen(llama)
    with proposing(store, reference_model) as (suite, llama):
        assert seen(llama) == vanilla
        assert counts(suite) == (0, 0)
        ask(llama, QUESTIONS[0])
        assert counts(suite)[1] > 0


ASCII = r"root ::= [ -~\n]*"
SAMPLERS = {
    "grammar": {"temperature": 0.0, "grammar": ASCII},
    "sampled grammar": {"temperature": 0.3, "seed": 3, "grammar": ASCII},
    "sampled": {"temperature": 0.9, "seed": 3},
    "penalties": {"temperature": 0.0, "repeat_penalty": 1.3, "presence_penalty": 0.5},
    "mirostat": {"temperature": 0.9, "seed": 3, "mirostat_mode": 2},
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_samplers_draw_what_they_draw_without_drafts(store, reference_model, name):
    """Each sampler sees a token once, when it is accepted; rejected drafts are not shown to it."""

    def texts(llama):
        for question in QUESTIONS:
            given = dict(SAMPLERS[name])
            if "grammar" in given:
                given["grammar"] = LlamaGrammar.from_string(given["grammar"], verbose=False)
            llama.reset()
            reply = llama(f"User: {question}\nAssistant:", max_tokens=N, **given)
            yield reply["choices"][0]["text"]

    with contextlib.closing(Llama(str(reference_model), **ENGINE, **ONE_BY_ONE)) as llama:
        vanilla = list(texts(llama))
    with proposing(store, reference_model) as (suite, llama):
        assert list(texts(llama)) == vanilla
        assert counts(suite)[0] > 0


def test_afterwards_the_engine_is_as_vanilla_has_it(store, reference_model):
    """A short batch of the app's own gives the logits of its last token only."""

    def read(llama):
        ask(llama, QUESTIONS[0])
        llama.reset()
        llama.eval(llama.tokenize(b"Who feeds Bruno?"))
        n_outputs = sum(llama._batch.batch.logits[i] for i in range(llama.n_tokens))
        logits = llama_cpp.llama_get_logits(llama.ctx)
        found = np.ctypeslib.as_array(logits, shape=(llama.n_vocab(),)).copy()
        return llama.draft_model, n_outputs, found.argmax(), found.max()

    with contextlib.closing(Llama(str(reference_model), **ENGINE, **ONE_BY_ONE)) as llama:
        vanilla = read(llama)
    with proposing(store, reference_model) as (suite, llama):
        assert read(llama) == vanilla
        assert counts(suite)[1] > 0


def test_engines_in_many_threads(store, reference_model):
    with contextlib.ExitStack() as stack:
        suite, first = stack.enter_context(proposing(store, reference_model))
        settings = ENGINE | ONE_BY_ONE
        llamas = [Llama(str(reference_model), **settings) for _ in range(5)]
        for llama in llamas:
            stack.enter_context(contextlib.closing(llama))
        expected = ask(first, QUESTIONS[0])
        with ThreadPoolExecutor(len(llamas)) as pool:
            found = pool.map(lambda llama: [ask(llama, QUESTIONS[0]) for _ in range(3)], llamas)
            for _ in range(20):
                counts(suite)
        assert list(found) == [[expected] * 3] * len(llamas)


@pytest.mark.slow
def test_a_reply_at_the_limit_ends_where_it_does_without_drafts(tmp_path, reference_model):
    """Tokens that are only proposed take no room in a context."""

    def answers(llama, limit):
        settings = ServiceConfig(state_dir=tmp_path / str(limit), max_context_tokens=limit)
        with LLMService(llama, settings) as service:
            context = service.bind("mail").new_context()
            reply = context.call(QUESTIONS[0], max_tokens=100, temperature=0.0)
            shutil.rmtree(settings.state_dir)
            return reply.text, reply.finish_reason, reply.n_tokens

    limits = range(48, 64)
    with contextlib.closing(Llama(str(reference_model), **ENGINE, **ONE_BY_ONE)) as llama:
        expected = [answers(llama, limit) for limit in limits]
        long = answers(llama, 100)[0]
    messages = (Message("user", QUESTIONS[0]), Message("assistant", long))
    fill(tmp_path / "store", reference_model, [Conversation("long", "chat", messages, True)])
    with proposing(tmp_path / "store", reference_model) as (suite, llama):
        assert [answers(llama, limit) for limit in limits] == expected
        assert counts(suite)[1] > 0

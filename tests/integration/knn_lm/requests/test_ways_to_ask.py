"""knn_lm under every kind of request, in this process and over HTTP."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json

import pytest
from datastores import QUESTIONS, K
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding
from mixed_requests import (
    ONE_BY_ONE,
    Steps,
    mixing_engine,
    said,
    tokens_of,
    watched,
)
from served import ENGINE as SERVED
from served import serving

import llmaas_plugins
from llmaas_hooks import serving_context


@pytest.fixture(scope="session")
def reference_model(packaged_model):
    """Return the packaged model, which the service has."""
    return packaged_model


class TestWaysToAsk:
    """Same text for all kinds of requests, whatever is batched, restored or proposed."""

    @pytest.fixture(scope="class")
    @classmethod
    def replies(cls, pairs, reference_model, tmp_path_factory):
        """Return replies of a plain engine with the datastore."""
        folder = tmp_path_factory.mktemp("replies")
        pairs.write(folder)
        with mixing_engine(reference_model, folder) as (_, llama):
            return [said(llama, question) for question in QUESTIONS]

    @pytest.fixture
    def ours(self, replies, mixing):
        """Return a function that activates the suite and returns a plain engine's replies."""

        def start(**suite):
            mixing(**suite)
            return replies

        return start

    def test_replies_are_others_than_vanillas(self, ours, vanilla):
        found = ours()
        llmaas_plugins.active_suite().deactivate()
        assert found != vanilla(lambda llama: [said(llama, q) for q in QUESTIONS], **ONE_BY_ONE)
        assert "boat" in found[0]

    @pytest.mark.parametrize(
        "engine",
        [
            {"logits_all": True},
            {"n_batch": 8},
            {"n_batch": 1},
            {"logits_all": True, "n_batch": 8, "n_ctx": 128},
            {"draft_model": LlamaPromptLookupDecoding(num_pred_tokens=4)},
        ],
        ids=["all logits", "short batches", "no batches", "all, in short batches", "drafts"],
    )
    def test_other_batches(self, ours, make, engine):
        expected = ours()
        llama = make(**(ONE_BY_ONE | engine))
        assert [said(llama, question) for question in QUESTIONS] == expected

    def test_drafts_are_verified_against_the_mixture(self, ours, make):
        """The text repeats itself, so that some drafts are right."""
        steps = Steps()
        ours(witness=steps)
        drafts = LlamaPromptLookupDecoding(num_pred_tokens=4)
        found = []
        for llama in (make(**ONE_BY_ONE), make(draft_model=drafts, **ONE_BY_ONE)):
            steps.n = 0
            reply = said(llama, "Where does Bruno sleep? Bruno sleeps in the old boat behind", 32)
            found.append((reply, steps.n))
        (expected, n_plain), (reply, n_drafting) = found
        assert reply == expected
        assert n_drafting < n_plain

    def test_streams(self, ours, make):
        expected = ours()
        llama = make(**ONE_BY_ONE)
        for question, reply in zip(QUESTIONS, expected, strict=True):
            prompt = f"User: {question}\nAssistant:"
            chunks = llama(prompt, temperature=0.0, max_tokens=16, stream=True)
            assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == reply

    def test_streams_left_early(self, ours, make):
        expected = ours()
        llama = make(**ONE_BY_ONE)
        for n in (1, 5, 2):
            stream = llama.generate(tokens_of(llama, QUESTIONS[1]), temp=0.0)
            list(itertools.islice(stream, n))
            stream.close()
            assert [said(llama, question) for question in QUESTIONS] == expected

    def test_states_that_the_app_saved(self, ours, make):
        """Saved states hold mixed logits, so a loaded state is evaluated again."""
        expected = ours()
        llama = make(**ONE_BY_ONE)
        saved = []
        for question in QUESTIONS:
            watched(llama, tokens_of(llama, question), 1)
            saved.append(llama.save_state())
        for state, question, reply in zip(saved, QUESTIONS, expected, strict=True):
            llama.load_state(state)
            assert said(llama, question) == reply
            with llmaas_plugins.without("knn_lm"):
                alone = said(llama, question)
            llama.reset()
            with llmaas_plugins.without("knn_lm"):
                assert said(llama, question) == alone

    def test_logprobs_are_the_models_own(self, ours, make, mixing):
        """``Llama`` copies the logits before anything is sampled."""
        ours()
        llama = make(logits_all=True, **ONE_BY_ONE)
        prompt = f"User: {QUESTIONS[0]}\nAssistant:"

        def top():
            reply = llama(prompt, temperature=0.0, max_tokens=1, logprobs=3)
            return reply["choices"][0]["logprobs"]["top_logprobs"][0], reply["choices"][0]["text"]

        logprobs, token = top()
        llama.reset()
        with llmaas_plugins.without("knn_lm"):
            alone, likeliest = top()
        assert alone.items() <= logprobs.items()
        assert token != likeliest == max(alone, key=alone.get)

    def test_several_engines_on_one_model(self, ours, make):
        expected = ours()
        llamas = [make(**ONE_BY_ONE), make(**ONE_BY_ONE)]
        for question, reply in zip(QUESTIONS, expected, strict=True):
            assert [said(llama, question) for llama in llamas] == [reply] * 2

    def test_token_by_token_in_turns(self, ours, make):
        """Two requests alternate on two engines, one of them without the plugin."""
        ours()
        llamas = [make(**ONE_BY_ONE) for _ in range(2)]
        prompt = tokens_of(llamas[0], QUESTIONS[0])

        def start(llama, names):
            with llmaas_plugins.without(*names):
                stream = llama.generate(prompt, temp=0.0)
                return [next(stream)], stream

        runs = [start(llamas[0], ()), start(llamas[1], ("knn_lm",))]
        for _ in range(8):
            for tokens, stream in runs:
                tokens.append(next(stream))
        for _, stream in runs:
            stream.close()
        with_, without = (tokens for tokens, _ in runs)
        assert with_ == watched(make(**ONE_BY_ONE), prompt, 9)[0]
        with llmaas_plugins.without("knn_lm"):
            assert without == watched(make(**ONE_BY_ONE), prompt, 9)[0]
        assert with_ != without

    def test_contexts_that_are_restored(self, ours, mixing, make, tmp_path):
        """With kv_chunks, contexts take turns and come back in a second life."""
        kept = {"codec": "lossless", "recompute": False, "store": str(tmp_path / "kv")}
        plugins = {"kv_chunks": kept}
        expected = ours()
        for _ in range(2):
            suite = mixing(plugins=plugins)
            llama = make(**ONE_BY_ONE)
            for _ in range(2):
                for question, reply in zip(QUESTIONS, expected, strict=True):
                    with serving_context(question):
                        assert said(llama, question) == reply
            report = suite.status()["plugins"]["kv_chunks"]
            assert report["restored_tokens"] > 0
            assert (report["left_alone"], report["faults"]) == ([], 0)
            llama.close()

    def test_contexts_that_do_without_kv_chunks(self, mixing, make, tmp_path):
        """Such contexts are neither saved nor restored."""
        kept = {"codec": "lossless", "recompute": False, "store": str(tmp_path / "kv")}
        suite = mixing(plugins={"kv_chunks": kept})
        llama = make(**ONE_BY_ONE)

        def report():
            found = suite.status()["plugins"]["kv_chunks"]
            return found["restores"], found["saves"]

        def ask(question):
            with serving_context(question):
                return said(llama, question)

        with llmaas_plugins.without("kv_chunks"):
            expected = [ask(question) for question in QUESTIONS]
        assert report() == (0, 0)
        assert [ask(question) for question in QUESTIONS * 2] == expected * 2
        n_restores, n_saves = report()
        assert min(n_restores, n_saves) > 0
        with llmaas_plugins.without("kv_chunks"):
            assert [ask(question) for question in QUESTIONS] == expected
        assert report() == (n_restores, n_saves)


@pytest.fixture(scope="module")
def server(pairs, tmp_path_factory):
    pytest.importorskip("fastapi")
    folder = tmp_path_factory.mktemp("serve")
    pairs.write(folder / "knn")
    config = (
        'on_error = "raise"\n[service]\nstate_dir = "state"\n'
        f'[plugins.knn_lm]\nstore = "knn"\nk = {K}\nlook_back = 0\n'
        '[plugins.kv_chunks]\nstore = "kv"\ncodec = "lossless"\nrecompute = false\n'
    )
    with serving(folder, config=config) as server:
        yield server


class TestService:
    """``llmaas serve``, called by an unmodified OpenAI client and by our own."""

    @pytest.fixture
    def chat(self, server):
        """Return the reply to a question, without some plugins."""
        openai = pytest.importorskip("openai")

        def chat(question, *without, stream=False):
            headers = {"X-LLMaaS-Without": ", ".join(without)} if without else {}
            options = {"temperature": 0.0, "max_tokens": 12, "extra_headers": headers}
            messages = [{"role": "user", "content": question}]
            done = client.chat.completions.create(
                model="any", messages=messages, stream=stream, **options
            )
            if stream:
                return "".join(chunk.choices[0].delta.content or "" for chunk in done)
            return done.choices[0].message.content

        with openai.OpenAI(base_url=f"{server.address}/v1", api_key="none") as client:
            yield chat

    @pytest.fixture
    def said_here(self, make):
        """Return ``Llama``'s answers in this process, with the server's settings."""

        def say():
            with contextlib.closing(make(**(SERVED | {"flash_attn": True}))) as llama:
                return [
                    llama.create_chat_completion(
                        [{"role": "user", "content": question}],
                        temperature=0.0, max_tokens=12, repeat_penalty=1.1,
                    )["choices"][0]["message"]["content"]
                    for question in QUESTIONS
                ]  # fmt: skip

        return say

    @pytest.mark.slow
    def test_requests_with_and_without(self, chat, server, mixing, said_here):
        alone = said_here()
        with mixing():
            ours = said_here()
        assert alone != ours
        for _ in range(2):
            assert [chat(question) for question in QUESTIONS] == ours
            assert [chat(question, "knn_lm") for question in QUESTIONS] == alone
            assert [chat(question, "knn_lm", stream=True) for question in QUESTIONS] == alone
            assert [chat(question, stream=True) for question in QUESTIONS] == ours
        before = server.kv()
        assert [chat(question, "kv_chunks", "knn_lm") for question in QUESTIONS] == alone
        after = server.kv()
        assert (before["restores"], before["saves"]) == (after["restores"], after["saves"])
        n_mixed = server.metrics()["llmaas_knn_lm_mixed"]
        assert n_mixed == server.status()["plugins"]["knn_lm"]["mixed"] > 0

    def test_calls_of_contexts_with_and_without(self, server):
        context = server.client.bind("mail").new_context()
        path = f"/v1/llmaas/apps/mail/contexts/{context.id}/call"
        before = server.status()["plugins"]["knn_lm"]["mixed"]
        body = {"prompt": QUESTIONS[0], "max_tokens": 4}
        headers = [("X-LLMaaS-Without", "kv_chunks"), ("x-llmaas-without", " knn_lm ,")]
        assert post(server, path, body, headers)[0] == 200
        assert server.status()["plugins"]["knn_lm"]["mixed"] == before
        assert post(server, path, body, [("X-LLMaaS-Without", "")])[0] == 200
        assert server.status()["plugins"]["knn_lm"]["mixed"] > before

    @pytest.mark.parametrize("name", ["knn", "knn_lm, nothing", "\u00fc", "knn_lm;q=1"])
    def test_names_that_nobody_knows(self, server, name):
        body = {"prompt": "Hi", "max_tokens": 1}
        status, answer = post(server, "/v1/completions", body, [("X-LLMaaS-Without", name)])
        assert status == 400
        said = json.loads(answer)["error"]["message"]
        assert "X-LLMaaS-Without: unknown plugin" in said
        assert "Installed: deadlines, elastic, flash_weights, knn_lm, kv_chunks" in said


def post(server, path, body, headers):
    """Return an answer's status and body; a header may occur more than once."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    with contextlib.closing(connection):
        connection.putrequest("POST", path)
        data = json.dumps(body).encode()
        for name, value in (
            ("Content-Type", "application/json"),
            ("Content-Length", str(len(data))),
            *headers,
        ):
            connection.putheader(name, value.encode("latin-1"))
        connection.endheaders(data)
        response = connection.getresponse()
        return response.status, response.read()

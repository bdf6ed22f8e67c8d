"""knn_lm's effect on requests: one distribution, under every sampler and kind of request."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json

import numpy as np
import pytest
from datastores import ENGINE, QUESTIONS, K, Natives, softmax, stored
from llama_cpp import Llama, LlamaGrammar, LogitsProcessorList, llama_cpp
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding
from served import ENGINE as SERVED
from served import serving

import llmaas_plugins
from llmaas_hooks import UnknownPluginError, hookimpl, serving_context
from llmaas_plugins import activate

ONE_BY_ONE = {"n_ubatch": 1, "flash_attn": True}
"""With these, a token's logits do not depend on the other tokens of its batch."""

NAME = {"enum": ["Bruno", "Anna"]}
NAMES = {"type": "object", "properties": {"name": NAME}, "required": ["name"]}
SAMPLERS = {
    "greedy": {"temp": 0.0},
    "temperature alone": {"temp": 1.3, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
    "top-k": {"temp": 0.9, "top_k": 5},
    "top-p": {"temp": 0.9, "top_p": 0.5},
    "min-p": {"temp": 0.9, "min_p": 0.2},
    "typical": {"temp": 0.9, "typical_p": 0.5},
    "mirostat": {"temp": 0.9, "mirostat_mode": 1},
    "mirostat 2": {"temp": 0.9, "mirostat_mode": 2},
    "softmax alone": {"temp": -1.0},
    "penalties": {
        "temp": 0.0,
        "repeat_penalty": 1.3,
        "frequency_penalty": 0.5,
        "presence_penalty": 0.5,
    },
    "grammar": {"temp": 0.0, "grammar": NAMES},
    "sampled grammar": {"temp": 0.9, "grammar": NAMES},
}


class Witness(Natives):
    """Plugin that taps hidden states and logits before the tested plugin changes them."""

    def __init__(self):
        super().__init__()
        self.taps = {}
        self.states = {}
        self.seen = []

    @hookimpl
    def llmaas_request_begin(self, request):
        ctx = request.engine.ctx
        if ctx not in self.taps:
            self.taps[ctx] = self.by_ctx[ctx].hidden_states("ffn_input")

    @hookimpl
    def llmaas_decode(self, step):
        if step.ctx in self.taps:
            self.states[step.ctx] = self.taps[step.ctx].take()

    @hookimpl(tryfirst=True)
    def llmaas_logits(self, view):
        self.seen.append((self.states[view.ctx][view.index], view.logits.copy()))


class Steps:
    """Counter of batches."""

    n = 0

    @hookimpl
    def llmaas_decode(self):
        self.n += 1


@pytest.fixture(scope="module")
def pairs(reference_model):
    return stored(reference_model)


@pytest.fixture
def store(pairs, tmp_path):
    pairs.write(tmp_path / "knn")
    return tmp_path / "knn"


@pytest.fixture
def mixing(store):
    """Return a function that activates with the datastore; each activation is a new life."""
    with contextlib.ExitStack() as stack:

        def start(witness=None, plugins=(), **table):
            stack.close()
            own = {"store": str(store), "k": K, "look_back": 0} | table
            config = {"on_error": "raise", "plugins": {"knn_lm": own, **dict(plugins)}}
            listeners = {} if witness is None else {"witness": witness}
            return stack.enter_context(activate(config, listeners))

        yield start


def tokens_of(llama, question):
    return llama.tokenize(f"User: {question}\nAssistant:".encode(), special=True)


def watched(llama, prompt, n=12, sampling=SAMPLERS["greedy"], processor=None):
    """Return the next tokens, and the logits from which each was sampled."""
    rows = []

    def watch(input_ids, scores):
        scores = scores if processor is None else processor(len(rows))
        rows.append(scores.copy())
        return scores

    sampling = dict(sampling)
    if "grammar" in sampling:
        schema = json.dumps(sampling["grammar"])
        sampling["grammar"] = LlamaGrammar.from_json_schema(schema, verbose=False)
    stream = llama.generate(prompt, logits_processor=LogitsProcessorList([watch]), **sampling)
    wanted = itertools.takewhile(lambda token: token != llama.token_eos(), stream)
    tokens = list(itertools.islice(wanted, n))
    stream.close()
    return tokens, np.array(rows)


def said(llama, question=QUESTIONS[0], n=16, **kwargs):
    options = {"temperature": 0.0, "max_tokens": n} | kwargs
    return llama(f"User: {question}\nAssistant:", **options)["choices"][0]["text"]


def mixed(suite):
    return suite.status()["plugins"]["knn_lm"]["mixed"]


@pytest.fixture
def vanilla(make):
    """Return a function that runs stock llama-cpp-python's sampling on a similar engine."""

    def ask(does, **engine):
        assert llmaas_plugins.active_suite() is None
        with contextlib.closing(make(**engine)) as llama:
            return does(llama)

    return ask


class TestDistribution:
    @pytest.mark.parametrize("question", QUESTIONS)
    def test_is_that_of_the_equations(self, mixing, make, pairs, question):
        """A search in all keys gives the expectation, from hidden states tapped independently."""
        witness = Witness()
        suite = mixing(witness)
        llama = make()
        _, rows = watched(llama, tokens_of(llama, question))
        assert mixed(suite) == len(rows) == len(witness.seen)
        changes = []
        for row, (state, logits) in zip(rows, witness.seen, strict=True):
            found, expected = softmax(row), pairs.probabilities(state, logits)
            assert np.allclose(found, expected, rtol=2e-3, atol=1e-7)
            changes.append(np.abs(found - softmax(logits)).max())
        assert max(changes) > 0.1

    def test_is_what_every_sampler_samples_from(self, mixing, make, vanilla):
        """Vanilla's own samplers draw the same tokens from the same logits."""

        def ask(llama, name, processor=None, n=16):
            llama.reset()
            prompt = tokens_of(llama, QUESTIONS[1])
            return watched(llama, prompt, n, SAMPLERS[name], processor)

        def ask_all(llama):
            for name, (tokens, rows) in ours.items():
                assert ask(llama, name, rows.__getitem__)[0] == tokens, name
                _, alone = ask(llama, name, n=1)
                assert not np.array_equal(rows[0], alone[0]), name

        suite, llama, ours = mixing(), make(), {}
        for name in SAMPLERS:
            before = mixed(suite)
            ours[name] = ask(llama, name)
            assert mixed(suite) == before + len(ours[name][1]), name
        suite.deactivate()
        vanilla(ask_all)

    def test_leaves_banned_tokens_banned(self, mixing, make):
        """Tokens may be banned by another plugin or by the app's bias."""

        class Ban:
            @hookimpl(tryfirst=True)
            def llmaas_logits(self, view):
                view.logits[banned] = -np.inf

        suite = mixing()
        llama = make()
        banned = watched(llama, tokens_of(llama, QUESTIONS[0]))[0]
        assert len(set(banned)) > 6
        bias = {str(token): float("-inf") for token in banned}
        reply = llama.tokenize(said(llama, logit_bias=bias).encode(), add_bos=False)
        assert not set(banned) & set(reply)
        before = mixed(suite)
        suite.hooks.register("ban", Ban())
        tokens, rows = watched(llama, tokens_of(llama, QUESTIONS[0]))
        assert mixed(suite) > before
        assert np.isneginf(rows[:, banned]).all()
        assert not set(banned) & set(tokens)

    def test_is_mixed_once_however_often_a_row_is_sampled(self, mixing, make):
        suite = mixing()
        llama = make()
        prompt = tokens_of(llama, QUESTIONS[0])
        (token,), (row,) = watched(llama, prompt, 1)
        assert [llama.sample(temp=0.0) for _ in range(3)] == [token] * 3
        assert mixed(suite) == 1
        # Llama samples from present logits, and evaluates nothing
        (_, again) = watched(llama, prompt, 1)
        assert np.array_equal(again[0], row)

    def test_grammar_holds(self, mixing, make):
        mixing()
        llama = make()
        schema = json.dumps(NAMES)
        for question in QUESTIONS:
            grammar = LlamaGrammar.from_json_schema(schema, verbose=False)
            reply = json.loads(said(llama, question, 40, grammar=grammar))
            assert reply["name"] in ("Bruno", "Anna")


def rows_of(llama):
    """Return logits of a few tokens of each question in one array, and all tokens."""
    found = [watched(llama, tokens_of(llama, question), 6) for question in QUESTIONS]
    tokens, rows = zip(*found, strict=True)
    return list(itertools.chain(*tokens)), np.concatenate(rows)


def same(found, expected):
    return found[0] == expected[0] and np.array_equal(found[1], expected[1])


class TestVanilla:
    """Bit-identical results where nothing is to be mixed."""

    @pytest.fixture(scope="class")
    @classmethod
    def alone(cls, reference_model):
        with contextlib.closing(Llama(str(reference_model), **ENGINE)) as llama:
            return rows_of(llama)

    def test_mixing_is_seen_here(self, mixing, make, alone):
        mixing()
        assert not same(rows_of(make()), alone)

    @pytest.mark.parametrize("table", [{"alpha": 0.0}, {"skip_above": 0.0}], ids=str)
    def test_when_neighbors_have_no_weight_or_are_never_searched(self, mixing, make, alone, table):
        suite = mixing(**table)
        assert same(rows_of(make()), alone)
        report = suite.status()["plugins"]["knn_lm"]
        n_skipped = len(alone[0]) if "skip_above" in table else 0
        assert (report["skipped"], report["mixed"]) == (n_skipped, len(alone[0]) - n_skipped)

    def test_when_the_model_is_sure_enough(self, mixing, make, alone):
        """The decision is made anew for each token."""
        witness = Witness()
        suite = mixing(witness, skip_above=0.5)
        _, rows = rows_of(make())
        is_sure = [softmax(logits).max() >= 0.5 for _, logits in witness.seen]
        is_same = [
            np.array_equal(row, logits) for row, (_, logits) in zip(rows, witness.seen, strict=True)
        ]
        assert is_same == is_sure
        report = suite.status()["plugins"]["knn_lm"]
        assert report["skipped"] == sum(is_sure) > 0
        assert report["mixed"] == len(rows) - sum(is_sure) > 0

    def test_when_a_request_does_without(self, mixing, make, alone):
        suite = mixing()
        llama = make()
        ours = rows_of(llama)
        llama.reset()
        with llmaas_plugins.without("knn_lm"):
            assert same(rows_of(llama), alone)
        assert mixed(suite) == len(ours[0])
        llama.reset()
        assert same(rows_of(llama), ours)

    def test_when_a_request_that_needs_no_evaluation_does_without(self, mixing, make, alone):
        """``Llama`` samples again from present logits, which were mixed before."""
        mixing()
        llama = make()
        prompt = tokens_of(llama, QUESTIONS[0])
        ours = watched(llama, prompt, 1)
        with llmaas_plugins.without("knn_lm"):
            tokens, rows = watched(llama, prompt, 1)
            assert tokens == alone[0][:1]
            assert np.array_equal(rows, alone[1][:1])
        assert same(watched(llama, prompt, 1), ours)

    def test_names_add_up_and_are_checked(self, mixing, make, alone):
        mixing()
        llama = make()
        with llmaas_plugins.without("knn_lm"), llmaas_plugins.without("kv_chunks"):
            assert same(rows_of(llama), alone)
        with pytest.raises(UnknownPluginError, match=r"'knn'.*Did you mean 'knn_lm'"):
            llmaas_plugins.without("knn")
        with llmaas_plugins.without():
            llama.reset()
            assert not same(rows_of(llama), alone)


class TestWaysToAsk:
    """Same text for all kinds of requests, whatever is batched, restored or proposed."""

    @pytest.fixture(scope="class")
    @classmethod
    def replies(cls, pairs, reference_model, tmp_path_factory):
        """Return replies of a plain engine with the datastore."""
        folder = tmp_path_factory.mktemp("replies")
        pairs.write(folder)
        own = {"store": str(folder), "k": K, "look_back": 0}
        with (
            activate({"on_error": "raise", "plugins": {"knn_lm": own}}),
            contextlib.closing(Llama(str(reference_model), **(ENGINE | ONE_BY_ONE))) as llama,
        ):
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
        assert "Installed: elastic, flash_weights, knn_lm, kv_chunks" in said


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


def mixer_of(suite, llama):
    """Return the mixer of an engine."""
    return suite.plugin("knn_lm")._served[int(llama.ctx)].mixer


class TestTrust:
    """Trust in the datastore, derived from how it predicts the prompt."""

    KNOWN = (
        f"User: {QUESTIONS[1]}\nAssistant: At seven, from the pier.\n"
        f"User: {QUESTIONS[0]}\nAssistant: Bruno sleeps in the old boat behind the"
    )

    @staticmethod
    def weight(suite, llama, prompt, n=1):
        """Return a prompt's trust after ``n`` tokens of a reply."""
        tokens = llama.tokenize(prompt.encode(), special=True)
        stream = llama.generate(tokens, temp=0.0)
        for _ in range(n):
            next(stream)
        return mixer_of(suite, llama)._trust.trust.weight

    @pytest.fixture(scope="class")
    @classmethod
    def expected(cls, pairs, reference_model, tmp_path_factory):
        """Return the trust of a known text, evaluated at once by a fresh engine."""
        folder = tmp_path_factory.mktemp("expected")
        pairs.write(folder)
        own = {"store": str(folder), "k": K, "look_back": 32}
        with (
            activate({"on_error": "raise", "plugins": {"knn_lm": own}}) as suite,
            contextlib.closing(Llama(str(reference_model), **(ENGINE | ONE_BY_ONE))) as llama,
        ):
            return cls.weight(suite, llama, cls.KNOWN)

    def test_a_known_text_is_trusted_and_another_is_not(self, make, mixing, expected):
        assert expected > 0.9
        other = "The treaty of 1648 ended a war between 12 states, as numbers 7 and 9 of it say,"
        with mixing(look_back=32) as suite, contextlib.closing(make()) as llama:
            # and distant neighbors have no weight anyway
            assert self.weight(suite, llama, other) < 0.25

    def test_is_the_same_in_whatever_batches(self, make, mixing, expected):
        with mixing(look_back=32) as suite:
            for n_batch in (1, 5, 31, 32, 33):
                llama = make(**ONE_BY_ONE, n_batch=n_batch)
                assert self.weight(suite, llama, self.KNOWN) == expected, n_batch
                llama.close()

    def test_is_the_same_whatever_came_before(self, make, mixing, expected, monkeypatch):
        with mixing(look_back=32) as suite:
            llama = make(**ONE_BY_ONE)
            for start in ("The treaty of 1648", self.KNOWN[:-70], self.KNOWN, self.KNOWN + " sea"):
                self.weight(suite, llama, start, n=3)
                assert self.weight(suite, llama, self.KNOWN) == expected

            def fail(_):
                raise RuntimeError("the client left")

            with monkeypatch.context() as patch:
                patch.setattr(llama._ctx, "decode", fail)
                with pytest.raises(RuntimeError, match="client"):
                    self.weight(suite, llama, self.KNOWN)
            assert self.weight(suite, llama, self.KNOWN) == expected

    def test_is_the_same_after_a_restart_that_restores_cells(self, make, mixing, tmp_path):
        kv = {"kv_chunks": {"store": str(tmp_path / "kv"), "codec": "lossless"}}
        long = "Anna wrote to Bruno in the winter. " * 3 + self.KNOWN
        texts = set()
        for turn in range(3):
            with mixing(look_back=32, plugins=kv) as suite:
                llama = make(**ONE_BY_ONE)
                text = llama(long, max_tokens=8, temperature=0.0)["choices"][0]["text"]
                texts.add((text, self.weight(suite, llama, long)))
                n_loaded = suite.status()["plugins"]["kv_chunks"]["restored_tokens"]
                assert (n_loaded > 0) == (turn > 0)
        assert len(texts) == 1

    def test_a_request_that_goes_on_without_its_beginning_has_the_prior(self, make, mixing):
        with mixing(look_back=32) as suite, contextlib.closing(make()) as llama:
            tokens = llama.tokenize(self.KNOWN.encode(), special=True)
            llama.eval(tokens[:20])
            stream = llama.generate(tokens[20:], temp=0.0, reset=False)
            next(stream)
            assert mixer_of(suite, llama)._trust.trust.weight == pytest.approx(0.25)

    def test_nothing_is_searched_for_a_text_that_it_does_not_know(self, make, mixing, monkeypatch):
        monkeypatch.setattr("llmaas_plugins.knn_lm.mixing.mixer._p_mix", lambda *_: 1e-6)
        with mixing(look_back=32) as suite, contextlib.closing(make()) as llama:
            tokens = llama.generate(llama.tokenize(QUESTIONS[2].encode()), temp=0.0)
            next(tokens)
            before = suite.status()["plugins"]["knn_lm"]
            next(tokens), next(tokens)
            after = suite.status()["plugins"]["knn_lm"]
        assert after["distrusted"] == before["distrusted"] + 2
        assert (after["mixed"], after["search_s"]) == (before["mixed"], before["search_s"])

    @pytest.mark.parametrize("n_tokens", [1, 6])
    def test_afterwards_the_app_reads_its_own_token_s_logits(self, make, vanilla, mixing, n_tokens):
        def read(llama):
            tokens = llama.tokenize(QUESTIONS[2].encode())
            found = []
            for n in (len(tokens), 3, len(tokens) - 4):
                said(llama, QUESTIONS[2], n=n_tokens)
                pointer = llama_cpp.llama_get_logits(llama.ctx)
                found.append(np.ctypeslib.as_array(pointer, shape=(llama.n_vocab(),)).copy())
                with contextlib.suppress(RuntimeError):  # a request that fails
                    next(llama.generate([10**6], temp=0.0))
                stream = llama.generate(tokens, temp=0.0)  # a stream that stays open
                next(stream)
                llama.reset()
                llama.eval(tokens[:n])
                pointer = llama_cpp.llama_get_logits(llama.ctx)
                found.append(np.ctypeslib.as_array(pointer, shape=(llama.n_vocab(),)).copy())
            return np.array(found)

        expected = vanilla(read, **ONE_BY_ONE)
        with mixing(look_back=32, alpha=1e-9):
            assert np.allclose(read(make(**ONE_BY_ONE)), expected, atol=1e-4)

    def test_rows_beyond_the_last_are_asked_for_only_then(self, make, mixing):
        with mixing(look_back=4) as suite, contextlib.closing(make()) as llama:
            tokens = llama.tokenize(QUESTIONS[0].encode())
            next(llama.generate(tokens, temp=0.0))
            mixer = mixer_of(suite, llama)
            assert len(mixer._rows) == 4
            llama.reset()
            with llmaas_plugins.without("knn_lm"):
                next(llama.generate([*tokens, 300], temp=0.0))
            assert len(mixer._rows) == 1

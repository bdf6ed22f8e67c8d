"""Drafts from stored conversations in ``Llama``: the model's own text in fewer batches.

Kernels sum in another order for other batch sizes. The reference for equal bits is therefore
vanilla with batches of the same sizes: with other wrong drafts, or token by token with
``n_ubatch=1``. For different batch sizes, texts may diverge at a tie within rounding noise.
"""

from __future__ import annotations

import contextlib
import json
import weakref

import numpy as np
import pytest
from drafting import attach, measured_costs
from families import write_family
from llama_cpp import Llama, LlamaGrammar, llama_speculative
from soak import scale

from llmaas_plugins.knn_lm.drafts.draft_model import DatastoreDraft

PROMPTS = (
    "My name is Anna and I live in a small house near the station. Tell me about your dog.",
    "User: I want to fly to Rome next Monday.\nAssistant:",
    "User: Find me a restaurant in San Jose, please.\nAssistant:",
    "My name is Bert and I work for a bank in a large city. I need",
)
GREEDY = {"temperature": 0.0, "max_tokens": 32}
CHEAP = {1: 1.0, 2: 1.2, 4: 1.4, 8: 1.8, 16: 2.6}
"""Batch costs as low as the small model's."""
ONE_BY_ONE = {"n_ctx": 512, "n_ubatch": 1, "n_threads_batch": 1, "flash_attn": True}
SEED = 5
WRONG = 17


def cells(*columns, says="yes"):
    def mark(test):
        for column in reversed(columns):
            test = pytest.mark.compat("clients", "Llama with DatastoreDraft", column, says)(test)
        return test

    return mark


class SamePasses(llama_speculative.LlamaDraftModel):
    """Draft model that repeats earlier draft lengths with as many right tokens, the rest wrong."""

    def __init__(self, passes, text):
        self.passes, self.text = dict(passes), text

    def __call__(self, input_ids, /, **_):
        n = len(input_ids)
        proposed = np.full(self.passes.get(n, 0), WRONG, dtype=np.intc)
        n_right = next((later for later in self.passes if later > n), len(self.text)) - n - 1
        right = self.text[n : n + min(n_right, len(proposed))]
        proposed[: len(right)] = right
        return proposed


class Recorded(DatastoreDraft):
    """Draft that records how many tokens it proposed at each position."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.passes = {}

    def __call__(self, input_ids, /, **_):
        proposed = super().__call__(input_ids)
        self.passes[len(input_ids)] = len(proposed)
        return proposed


@pytest.fixture(scope="module")
def said(reference_model):
    """Return the model's reply to each prompt, token by token."""
    settings = ONE_BY_ONE | {"n_threads": 1, "seed": 1, "verbose": False}
    with contextlib.closing(Llama(str(reference_model), **settings)) as llama:
        return [tokens_of(llama, prompt) for prompt in PROMPTS]


@pytest.fixture
def history(said):
    """Return conversations close to the model's replies: some words differ."""
    rng = np.random.default_rng(0)
    edited = [np.array(tokens) for tokens in said]
    for tokens in edited:
        tokens[rng.random(len(tokens)) < 0.05] = 300
    return edited


@pytest.fixture
def drafting(make, history):
    """Return a function that makes a ``Llama`` with drafts from ``history``."""

    def make_drafting(**settings):
        llama = make(**(ONE_BY_ONE | settings))
        attach(llama, DatastoreDraft(history, costs=CHEAP))
        return llama

    return make_drafting


def tokens_of(llama, prompt, n=60):
    """Return the prompt and ``n`` tokens that follow."""
    tokens = llama.tokenize(prompt.encode())
    stream = llama.generate(tokens, temp=0.0)
    return [*tokens, *(token for _, token in zip(range(n), stream, strict=False))]


def was_faster(llama, share=0.5):
    """Return whether most drafted tokens were accepted, and some were not."""
    counts = llama.draft_model.counts
    return share < counts.accepted / counts.proposed < 1


class TestTheSameText:
    @pytest.mark.slow
    def test_as_vanilla_that_verifies_batches_of_the_same_sizes(self, make, history):
        """Rejected drafts leave no trace, neither in the text nor in the logits."""
        settings = {"n_ctx": 512, "n_threads_batch": 1, "logits_all": True}
        ours, vanilla = make(**settings), make(**settings)
        attach(ours, Recorded(history, costs=CHEAP))
        sizes = set()
        for prompt in PROMPTS:
            ours.draft_model.passes.clear()
            text = tokens_of(ours, prompt)
            vanilla.draft_model = SamePasses(ours.draft_model.passes, text)
            assert tokens_of(vanilla, prompt) == text
            assert np.array_equal(ours.scores[: len(text) - 1], vanilla.scores[: len(text) - 1])
            sizes |= set(ours.draft_model.passes.values())
        assert sizes > {0, 15}
        assert was_faster(ours)

    @pytest.mark.parametrize("prompt", PROMPTS)
    def test_as_vanilla_without_drafts_but_for_ties(self, make, history, prompt):
        """Where texts diverge, vanilla's two logits differ by less than two batch sizes do."""
        settings = {"n_ctx": 512, "n_threads_batch": 1, "logits_all": True}
        vanilla, ours = make(**settings), make(**settings)
        attach(ours, DatastoreDraft(history, costs=CHEAP))
        expected, found = tokens_of(vanilla, prompt), tokens_of(ours, prompt)
        n_same = next(
            (i for i, (a, b) in enumerate(zip(expected, found, strict=True)) if a != b), None
        )
        if n_same is not None:
            row = vanilla.scores[n_same - 1]
            one_by_one = row.copy()
            vanilla.reset()
            vanilla.eval(expected[:n_same])
            noise = np.abs(vanilla.scores[n_same - 1] - one_by_one).max()
            assert row[expected[n_same]] - row[found[n_same]] <= 2 * noise

    @cells("drafts", "completion", "same as vanilla")
    def test_token_by_token_as_vanilla_without_drafts(self, drafting, said):
        llama = drafting()
        assert [tokens_of(llama, prompt) for prompt in PROMPTS] == said
        assert was_faster(llama)

    def test_as_given_to_llama_itself(self, make, history, said):
        draft = DatastoreDraft(history, costs=CHEAP)
        llama = make(draft_model=draft, logits_all=True, **ONE_BY_ONE)
        assert [tokens_of(llama, prompt) for prompt in PROMPTS] == said
        assert was_faster(llama)

    def test_with_nothing_stored(self, make, said):
        llama = make(**ONE_BY_ONE)
        attach(llama, DatastoreDraft([], costs=CHEAP))
        assert [tokens_of(llama, prompt) for prompt in PROMPTS] == said

    @pytest.mark.slow
    def test_with_a_hostile_datastore(self, make, said):
        """Whatever is stored, including end-of-text tokens, the text is the model's own."""
        rng = np.random.default_rng(0)
        wrong = [np.array(tokens) for tokens in said for _ in range(3)]
        for tokens in wrong:
            places = rng.random(len(tokens)) < 0.3
            tokens[places] = rng.choice([0, 1, 2, 300], places.sum())
        llama = make(**ONE_BY_ONE)
        attach(llama, DatastoreDraft(wrong, costs={1: 1.0, 16: 1.0}))
        assert [tokens_of(llama, prompt) for prompt in PROMPTS] == said
        assert llama.draft_model.counts.accepted < llama.draft_model.counts.proposed / 2


REQUESTS = {
    "sampling": {"temperature": 0.8, "seed": SEED, "max_tokens": 32},
    "sampling with penalties": {
        "temperature": 1.0, "seed": SEED, "repeat_penalty": 1.2, "max_tokens": 32,
    },
    "mirostat": {"mirostat_mode": 2, "seed": SEED, "max_tokens": 24},
    "stop strings": GREEDY | {"stop": ["\n", "the", " a "]},
    "a single token": GREEDY | {"max_tokens": 1},
    "a bias": GREEDY | {"logit_bias": {"300": 5.0}},
    "echo": GREEDY | {"echo": True, "max_tokens": 7},
}  # fmt: skip


class TestRequests:
    """Requests evaluated token by token, so that each equals the request without drafts."""

    @pytest.mark.parametrize("request_", REQUESTS.values(), ids=REQUESTS)
    def test_replies_are_the_same(self, make, drafting, request_):
        settings = {"n_ctx": 160}
        vanilla, ours = make(**(ONE_BY_ONE | settings)), drafting(**settings)
        for prompt in (*PROMPTS[1:3], PROMPTS[1]):
            expected, found = vanilla(prompt, **request_), ours(prompt, **request_)
            assert found["choices"] == expected["choices"]
            assert found["usage"] == expected["usage"]

    @cells("streaming", "cancel", "same as vanilla")
    def test_streams_are_the_same_also_if_left_early(self, make, drafting):
        def pieces(llama):
            found = []
            for n_pieces in (3, 24, 1):
                for prompt in PROMPTS:
                    stream = llama(prompt, stream=True, **GREEDY)
                    parts = zip(range(n_pieces), stream, strict=False)
                    found.append([part["choices"][0]["text"] for _, part in parts])
                    stream.close()
            return found

        ours = drafting()
        assert pieces(ours) == pieces(make(**ONE_BY_ONE))
        assert was_faster(ours)

    @pytest.mark.slow
    @cells("logprobs", "same as vanilla")
    def test_logprobs_are_the_same(self, make, drafting):
        settings = {"logits_all": True}
        vanilla, ours = make(**(ONE_BY_ONE | settings)), drafting(**settings)
        request_ = GREEDY | {"max_tokens": 16, "logprobs": 2}
        for prompt in PROMPTS:
            assert ours(prompt, **request_)["choices"] == vanilla(prompt, **request_)["choices"]
        assert ours.draft_model.counts.accepted > 0

    @cells("grammar / JSON", "same as vanilla")
    def test_a_grammar_holds(self, make, drafting):
        schema = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}}
        grammar = LlamaGrammar.from_json_schema(json.dumps(schema), verbose=False)
        vanilla, ours = make(**ONE_BY_ONE), drafting()
        for prompt in PROMPTS:
            expected = vanilla(prompt, grammar=grammar, **GREEDY)["choices"]
            assert ours(prompt, grammar=grammar, **GREEDY)["choices"] == expected

    @cells("chat", "same as vanilla")
    def test_chats_that_go_on_are_the_same(self, make, drafting):
        def chats(llama):
            messages = []
            for prompt in PROMPTS * scale(1, 5):
                messages = [*messages[-4:], {"role": "user", "content": prompt}]
                reply = llama.create_chat_completion(messages, temperature=0.0, max_tokens=24)
                messages.append(reply["choices"][0]["message"])
            return messages

        assert chats(drafting()) == chats(make(**ONE_BY_ONE))

    @pytest.mark.slow
    def test_what_is_stored_between_requests_is_proposed(self, make, said):
        llama = make(**ONE_BY_ONE)
        attach(llama, DatastoreDraft([], costs=CHEAP))
        for prompt, text in zip(PROMPTS, said, strict=True):
            assert tokens_of(llama, prompt) == text
            llama.draft_model.update(np.array(text))
        before = llama.draft_model.counts
        assert [tokens_of(llama, prompt) for prompt in PROMPTS] == said
        after = llama.draft_model.counts
        assert after.passes - before.passes < before.passes / 2

    @pytest.mark.slow
    def test_a_reply_as_long_as_the_context_is_the_same(self, make, drafting):
        """The context is longer than requested, because llama.cpp rounds up."""
        settings, request_ = {"n_ctx": 160}, {"temperature": 0.0, "max_tokens": None}
        vanilla, ours = make(**(ONE_BY_ONE | settings)), drafting(**settings)
        expected, found = vanilla(PROMPTS[1], **request_), ours(PROMPTS[1], **request_)
        assert found["choices"] == expected["choices"]
        assert found["usage"]["total_tokens"] == 256

    @pytest.mark.slow
    def test_a_full_context_ends_as_without_drafts(self, make, drafting):
        """``generate`` may be asked for more tokens than there is room for."""

        def end(llama):
            found = []
            with pytest.raises(RuntimeError, match="llama_decode returned 1"):
                found.extend(llama.generate(llama.tokenize(PROMPTS[1].encode()), temp=0.0))
            return llama.n_tokens

        assert end(drafting(n_ctx=256)) == end(make(**(ONE_BY_ONE | {"n_ctx": 256}))) == 256


class TestWithContextsKept:
    """kv_chunks and drafts in one process."""

    @pytest.mark.slow
    @cells("drafts", "contexts restored", "same as vanilla")
    def test_replies_and_restored_tokens(self, suite, make, history, said):
        restored = []
        for _ in range(2):
            found = suite(ram_budget="4 MiB")
            llama = make(**ONE_BY_ONE)
            attach(llama, DatastoreDraft(history, costs=CHEAP))
            for _ in range(2):
                assert [tokens_of(llama, prompt) for prompt in PROMPTS[:2]] == said[:2]
            report = found.status()["plugins"]["kv_chunks"]
            assert (report["left_alone"], report["faults"]) == ([], 0)
            assert was_faster(llama)
            restored.append(report["restored_tokens"])
            llama.close()
        assert min(restored) > 0


class TestAttaching:
    def test_texts_longer_than_a_batch(self, make, history):
        """With the draft model passed to ``Llama`` without ``logits_all``, these texts fail."""
        settings = {"n_batch": 32, "n_ctx": 512}
        vanilla, llama = make(**(ONE_BY_ONE | settings)), make(**(ONE_BY_ONE | settings))
        attach(llama, DatastoreDraft(history, costs=CHEAP))
        for prompt in (PROMPTS[1], " ".join(PROMPTS)):
            assert llama(prompt, **GREEDY)["choices"] == vanilla(prompt, **GREEDY)["choices"]

    def test_the_prompt_has_one_row_of_logits(self, drafting):
        llama = drafting()
        tokens_of(llama, " ".join(PROMPTS), n=1)
        flags = [bool(llama._batch.batch.logits[i]) for i in range(llama.n_tokens)]
        assert flags == [False] * (llama.n_tokens - 1) + [True]

    def test_engines_and_drafts_go_with_their_last_user(self, reference_model, said):
        """Their weights and user texts are freed without waiting for a collection."""
        llama = Llama(str(reference_model), **ONE_BY_ONE, n_threads=1, verbose=False)
        drafts = []
        for _ in range(2):
            attach(llama, DatastoreDraft(said, costs=CHEAP))
            tokens_of(llama, PROMPTS[0], n=4)
            drafts.append(weakref.ref(llama.draft_model))
            llama.draft_model = None
        assert [draft() for draft in drafts] == [None, None]
        engine = weakref.ref(llama)
        del llama
        assert engine() is None

    @pytest.mark.parametrize(
        ("settings", "reason"),
        [
            ({"n_batch": 8}, "n_batch is 8, but drafts need batches of 16 tokens"),
            ({"draft_model": DatastoreDraft([])}, "the engine has a draft model"),
        ],
    )
    def test_engines_that_cannot_are_refused(self, make, settings, reason):
        with pytest.raises(ValueError, match=f"no drafts: {reason}"):
            attach(make(**settings), DatastoreDraft([]))

    @pytest.mark.parametrize(
        ("family", "reason"),
        [
            ("mamba2", "recurrent model"),
            ("granitehybrid", "hybrid model"),
            ("gemma3", "sliding window without swa_full"),
        ],
    )
    def test_models_that_cannot_are_refused(self, tmp_path, family, reason):
        model = write_family(family, tmp_path / "model.gguf")
        settings = {"n_ctx": 256, "n_threads": 1, "verbose": False, "swa_full": False}
        with contextlib.closing(Llama(str(model), **settings)) as llama:
            with pytest.raises(ValueError, match=f"no drafts: {reason}"):
                attach(llama, DatastoreDraft([]))
            assert llama.draft_model is None

    def test_costs_are_measured_on_a_new_engine_which_stays_new(self, make, said):
        llama = make(**ONE_BY_ONE)
        attach(llama, DatastoreDraft([]))
        costs = measured_costs(llama)
        assert list(costs) == [1, 2, 4, 8, 16]
        assert costs[1] == 1.0
        assert list(costs.values()) == sorted(costs.values())
        assert tokens_of(llama, PROMPTS[0]) == said[0]

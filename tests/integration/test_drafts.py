"""Drafts that plugins offer: the best one is made, and the text is the same."""

from __future__ import annotations

import contextlib
import itertools

import pytest
from families import write_family
from llama_cpp import Llama
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

from llmaas_hooks import PluginError, Proposal, hookimpl

PROMPT = [1, 400, 401, 402, 403, 404]
N = 24
ONE_BY_ONE = {"n_ubatch": 1}  # the same kernels for every batch


def say(llama, n=N, **settings):
    with contextlib.closing(llama.generate(PROMPT, **({"temp": 0.0} | settings))) as generator:
        return list(itertools.islice(generator, n))


class Knowing:
    """A drafter that knows the text, and is wrong at every ``wrong``-th token."""

    def __init__(self, text, gain=2.0, most=3, wrong=10**6):
        self.text, self.gain, self.most, self.wrong = [*PROMPT, *text], gain, most, wrong
        self.asked, self.made, self.seconds = [], 0, {}

    def propose(self, tokens, seconds):
        self.asked.append(tokens.tolist())
        self.seconds = dict(seconds)
        return Proposal(self.gain, lambda: self.make(len(tokens)))

    def make(self, n):
        self.made += 1
        return [
            token if i % self.wrong else token + 1
            for i, token in enumerate(self.text[n : n + self.most], n)
        ]


class Offering:
    """A plugin that offers one drafter."""

    def __init__(self, drafter):
        self.drafter, self.batches, self.requests = drafter, [], 0

    @hookimpl
    def llmaas_draft(self, request, guess):
        self.requests, self.guess = self.requests + 1, guess
        return self.drafter

    @hookimpl
    def llmaas_decode(self, step):
        self.batches.append(step.n_tokens)

    @hookimpl
    def llmaas_request_end(self, stats):
        self.stats = stats


@pytest.fixture
def said(make):
    return say(make(**ONE_BY_ONE))


@pytest.mark.parametrize("wrong", [10**6, 5])
def test_hook_llmaas_draft(make, patched, said, wrong):
    offering = Offering(Knowing(said, wrong=wrong))
    patched(one=offering)
    llama = make(**ONE_BY_ONE)
    assert say(llama) == said
    assert llama.draft_model is None
    assert offering.requests == 1
    assert offering.stats.n_generated == N
    assert len(offering.batches) < N * (0.4 if wrong > N else 0.8)
    assert offering.drafter.asked[0] == [*PROMPT, said[0]]
    assert offering.drafter.seconds[4] > 0


def test_the_draft_with_the_largest_gain_is_made(make, patched, said):
    modest, best = Knowing(said, 1.5), Knowing(said, 3.0)
    none, unsure = Knowing(said, 0.9), Knowing(said, 1.0)
    drafters = {"modest": modest, "best": best, "none": none, "unsure": unsure}
    patched(**{name: Offering(one) for name, one in drafters.items()})
    assert say(make(**ONE_BY_ONE)) == said
    assert [one.made > 0 for one in drafters.values()] == [False, True, False, False]
    assert modest.asked == best.asked


def test_nothing_is_made_that_does_not_pay(make, patched, said):
    offering = Offering(Knowing(said, gain=1.0))
    patched(one=offering)
    assert say(make(**ONE_BY_ONE)) == said
    assert set(offering.batches[1:]) == {1}


def test_sampled_texts_are_those_of_the_same_seed(make, patched):
    sampling = {"temp": 1.0, "top_k": 0, "top_p": 1.0}
    llama = make(seed=5, **ONE_BY_ONE)
    expected = say(llama, **sampling)
    offering = Offering(Knowing(expected, wrong=4))
    patched(one=offering)
    assert say(make(seed=5, **ONE_BY_ONE), **sampling) == expected
    assert len(offering.batches) < N


def test_a_context_that_is_full_gets_no_draft_beyond_its_end(make, patched):
    settings = {"n_ctx": 32} | ONE_BY_ONE
    room = 32 - len(PROMPT)
    expected = say(make(**settings), room)
    offering = Offering(Knowing([*expected, *range(300, 320)]))
    patched(one=offering)
    assert say(make(**settings), room) == expected
    assert sum(offering.batches) <= 32 + 3 * len(PROMPT)


def test_a_small_batch_limits_drafts(make, patched, said):
    offering = Offering(Knowing(said, most=8))
    patched(one=offering)
    assert say(make(n_batch=4, **ONE_BY_ONE)) == said
    assert max(offering.batches[2:]) == 4


class Failing(Knowing):
    def make(self, n):
        super().make(n)
        raise OSError("no draft")


def test_a_drafter_that_fails_is_asked_no_more(make, patched, said, caplog):
    failing, other = Failing(said, gain=5.0), Knowing(said)
    patched(on_error="log", bad=Offering(failing), good=Offering(other))
    assert say(make(**ONE_BY_ONE)) == said
    assert (failing.made, other.made > 3) == (1, True)
    assert [record.getMessage()[:40] for record in caplog.records] == [
        "plugin 'bad' failed in llmaas_draft: OSE"
    ]


class Odd(Knowing):
    """A drafter of which one thing is wrong."""

    def __init__(self, said, gain=5.0, most=3, drafted=None):
        super().__init__(said, gain, most)
        self.drafted = drafted

    def make(self, n):
        return super().make(n) if self.drafted is None else self.drafted


@pytest.mark.parametrize(
    "wrong",
    [
        {"gain": None},
        {"gain": float("nan")},
        {"gain": "5"},
        {"most": None},
        {"most": 2.5},
        {"drafted": [1 << 30]},
        {"drafted": [1 << 40]},
        {"drafted": [-1]},
        {"drafted": [1.5, "x"]},
        {"drafted": [[1, 2]]},
        {"drafted": 7},
    ],
    ids=str,
)
def test_a_drafter_that_answers_nonsense_is_asked_no_more(make, patched, said, caplog, wrong):
    good = Knowing(said)
    patched(on_error="log", bad=Offering(Odd(said, **wrong)), good=Offering(good))
    assert say(make(**ONE_BY_ONE)) == said
    assert good.made > 3
    (record,) = caplog.records
    assert record.getMessage().startswith("plugin 'bad' failed in llmaas_draft: ")


def test_the_app_gets_the_error_if_it_wants_errors(make, patched, said):
    patched(bad=Offering(Failing(said)))
    llama = make(**ONE_BY_ONE)
    with pytest.raises(PluginError, match="'bad' failed in llmaas_draft: OSError: no draft"):
        say(llama)
    assert llama.draft_model is None


def test_requests_that_must_not_get_drafts(make, patched, said):
    offering = Offering(Knowing(said))
    patched(one=offering)
    llama = make(draft_model=LlamaPromptLookupDecoding(num_pred_tokens=2), logits_all=True)
    say(llama)
    assert llama.draft_model is not None
    say(make(), stopping_criteria=lambda tokens, logits: False)
    assert offering.requests == 0


@pytest.mark.parametrize(
    ("family", "swa_full", "n_requests"),
    [("mamba2", False, 0), ("granitehybrid", False, 0), ("gemma3", False, 0), ("gemma3", True, 1)],
)
def test_only_models_that_can_drop_tokens_are_offered_drafts(
    tmp_path, patched, family, swa_full, n_requests
):
    offering = Offering(Knowing([]))
    patched(p=offering)
    model = write_family(family, tmp_path / "model.gguf")
    options = {"n_ctx": 256, "n_threads": 1, "verbose": False, "swa_full": swa_full}
    with contextlib.closing(Llama(str(model), **options)) as llama:
        say(llama, 2)
    assert offering.requests == n_requests

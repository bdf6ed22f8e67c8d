"""The study of promises under load, against a real service of the packaged model."""

from __future__ import annotations

import numpy as np
import pytest
from llama_cpp import Llama
from preparing import prepare

from llmaas_eval.deadlines.loaded import answers, scoring
from llmaas_eval.deadlines.loaded.load import Call, Limits, ask, send
from llmaas_eval.deadlines.loaded.questions import AppQuestions, Question, packaged_questions
from llmaas_eval.deadlines.loaded.recorder import key_of
from llmaas_eval.deadlines.loaded.service import serving
from llmaas_eval.deadlines.loaded.systems import SYSTEMS
from llmaas_eval.elastic.engine import Variant
from llmaas_eval.elastic.prepared import variants

pytest.importorskip("fastapi")

LEVELS = (1.0, 0.6, 0.2)
ENOUGH, NONE = Limits(60_000.0, 60_000.0), Limits(0.0, 0.0)
APPS = packaged_questions()


@pytest.fixture(scope="module")
def model(reference_model, tmp_path_factory):
    return prepare(
        reference_model, tmp_path_factory.mktemp("model") / "model.gguf", tables=("uniform",)
    )


@pytest.fixture(scope="module")
def service(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("serve")
    with serving(SYSTEMS["fifo-constant"], "warm", model, folder) as service:
        yield service


def call(number, app="Rewind", limits=ENOUGH, levels=None, at_s=0.0):
    prompt = APPS[app].prompt(number)
    return Call(number, app, prompt, 16 + number, 300, limits, False, levels, at_s)


def test_answers_are_measured_and_recorded(service):
    ask(service, call(0))
    calls = [
        call(1),
        call(2, limits=NONE, levels=(0.6, 0.2), at_s=0.05),
        call(3, "GMail", at_s=0.1),
    ]
    answers = send(service, calls)
    assert [one.number for one in answers] == [1, 2, 3]
    assert [one.error for one in answers] == [None] * 3
    assert [one.n_tokens for one in answers] == [17, 18, 19]
    assert min(min(one.ttft_ms, one.tpot_ms) for one in answers) > 0
    records = service.records()
    first, second, third = (records[key_of(one.prompt)] for one in calls)
    assert (second.prefill, second.decode) == (0.6, 0.2)
    assert (first.prefill, first.decode) == (1.0, 1.0)
    assert first.n_reused > third.n_reused == 0  # the app's prefix was there, another app's not
    assert [one.n_generated for one in (first, second, third)] == [17, 18, 19]
    assert not first.is_planned


def test_a_refused_call_is_an_incomplete_answer(service):
    answer = ask(service, call(4, levels=(7.0, 1.0)))
    assert answer.error.startswith("ValueError: status 4")
    assert answer.met(ENOUGH) == (False, False)


def test_sending_ends_early_after_too_many_misses(model, tmp_path):
    calls = [call(i, limits=NONE, at_s=0.01 * i) for i in range(6)]
    with serving(SYSTEMS["fifo-constant"], "cold", model, tmp_path) as service:
        assert send(service, calls, most_missed=1) is None
        assert ask(service, call(7)).error.startswith("ConnectionRefusedError")


def test_a_service_that_does_not_start_says_why(reference_model, tmp_path):
    missing = tmp_path / "missing.gguf"
    with (
        pytest.raises(RuntimeError, match=r"does not answer: .*missing\.gguf"),
        serving(SYSTEMS["fifo-whole"], "cold", missing, tmp_path),
    ):
        pass


# -- answers -------------------------------------------------------------------------------------

APP = AppQuestions(
    "Question: Who sings?\nAnswer: the bird\n",
    [
        Question("Who flies?", ("a bird in the sky", "the stone", "no"), 0),
        Question("Who is late for the train?", ("my friend", "the moon over the house", "no"), 0),
    ],
)


@pytest.fixture(scope="module")
def items(reference_model):
    with answers.tokenizer(reference_model) as llama:
        return answers.app_items(APP, [0, 1], llama)


def test_scores_are_mean_log_probabilities_of_the_choices(reference_model, items):
    found = scoring.scores(Variant(reference_model), items, [(0, 0)])[0, 0]
    llama = Llama(str(reference_model), n_ctx=256, logits_all=True, n_threads=1, verbose=False)
    for i, item in enumerate(items):
        means = []
        for choice in item.choices:
            llama.reset()
            llama.eval([*item.prompt, *choice])
            logits = np.array(llama.scores[: llama.n_tokens], np.float64)
            logs = logits - np.logaddexp.reduce(logits, axis=1)[:, None]
            start = len(item.prompt) - 1
            means.append(np.mean([logs[start + k, token] for k, token in enumerate(choice)]))
        assert found.choice[i] == int(np.argmax(means))
        assert found.nats[i] == pytest.approx(-means[item.choice], rel=0.02)
    llama.close()


def test_prompt_and_answer_have_levels_of_their_own(model, items, tmp_path):
    variant = variants(model, LEVELS)["uniform"]
    kept = answers.Kept(tmp_path)
    pairs = [(i, j) for i in range(3) for j in range(3)]
    found = kept.scores("all", variant, items, pairs)
    assert [*found] == pairs
    assert len({float(each.nats[0]) for each in found.values()}) == 9
    alone = scoring.scores(variant, items, [(2, 1)])
    assert alone[2, 1].nats == pytest.approx(found[2, 1].nats, rel=1e-3)
    again = answers.Kept(tmp_path).scores("all", Variant(tmp_path / "gone.gguf"), items, pairs[3:])
    assert [*again] == pairs[3:]
    assert all((again[pair].nats == found[pair].nats).all() for pair in again)


def test_given_words_before_a_choice_do_not_count(reference_model, items):
    item = items[0]
    lead, rest = item.choices[0][:1], item.choices[0][1:]
    other = [*rest[:-1], rest[-1] + 1]
    led = scoring.Item(item.prompt, lead, [rest, other], 0)
    whole = scoring.Item(item.prompt, [], [[*lead, *rest], [*lead, *other]], 0)
    first = scoring.Item(item.prompt, [], [lead, lead], 0)
    found, base, one = (
        scoring.scores(Variant(reference_model), [each], [(0, 0)])[0, 0].nats[0]
        for each in (led, whole, first)
    )
    assert found * len(rest) + one == pytest.approx(base * (len(rest) + 1), rel=1e-3)

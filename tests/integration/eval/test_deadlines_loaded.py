"""The study of promises under load, against a real service of the packaged model."""

from __future__ import annotations

import numpy as np
import pytest
from llama_cpp import Llama
from preparing import prepare
from tiny_encoders import write_general

from llmaas_eval.deadlines.loaded import answers, scoring
from llmaas_eval.deadlines.loaded.load import Call, Limits, ask, send
from llmaas_eval.deadlines.loaded.questions import AppQuestions, Question, packaged_questions
from llmaas_eval.deadlines.loaded.recorder import key_of
from llmaas_eval.deadlines.loaded.service import serving
from llmaas_eval.deadlines.loaded.shorter import Shorter, trained_encoder
from llmaas_eval.deadlines.loaded.systems import SYSTEMS
from llmaas_eval.elastic.engine import Variant
from llmaas_eval.elastic.prepared import variants
from llmaas_plugins.short_prompts.config import ShortPromptsConfig
from llmaas_plugins.short_prompts.plugin import ShortPrompts

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


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    """A tiny encoder in the place of the one that `llmaas prompts learn` trains."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        yield write_general(tmp_path_factory.mktemp("package"))


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


@pytest.mark.slow
def test_the_share_of_a_prompt_that_was_read_is_recorded(model, encoder, tmp_path):
    long = APPS["GMail"].prefix * 3 + call(1).prompt
    short, whole = call(1)._replace(prompt=long, share=0.5), call(2)._replace(prompt=f"So {long}")
    with serving(SYSTEMS["ours-shorter"], "cold", model, tmp_path) as service:
        assert [ask(service, one).error for one in (short, whole)] == [None, None]
        records = service.records()
    assert [records[key_of(one.prompt)].share for one in (short, whole)] == [0.5, 1.0]


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
    found = scoring.scores(Variant(reference_model), items, {(0, 0): {0, 1}})[0, 0]
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
    kept, pairs = answers.Kept(tmp_path), [(i, j) for i in range(3) for j in range(3)]

    def ask(wanted):
        return scoring.scores(variant, items, wanted)

    found = kept.scores("all", 2, dict.fromkeys(pairs, (0, 1)), ask)
    assert [*found] == pairs
    assert len({float(each.nats[0]) for each in found.values()}) == 9
    alone = scoring.scores(variant, items, {(2, 1): [1], (0, 0): [0]})
    assert alone[2, 1].nats[1] == pytest.approx(found[2, 1].nats[1], rel=1e-3)
    assert (alone[2, 1].choice[0], alone[0, 0].choice[1]) == (-1, -1)
    again = answers.Kept(tmp_path).scores("all", 2, dict.fromkeys(pairs[3:], (0, 1)), ask=None)
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
        scoring.scores(Variant(reference_model), [each], {(0, 0): [0]})[0, 0].nats[0]
        for each in (led, whole, first)
    )
    assert found * len(rest) + one == pytest.approx(base * (len(rest) + 1), rel=1e-3)


# -- shorter prompts -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["warm", "cold"])
def test_shorter_prompts_have_the_words_that_the_plugin_keeps(reference_model, encoder, kind):
    app = APPS["GMail"]
    asked = app._replace(prefix=f"100-8\n{app.prefix}") if kind == "cold" else app
    plugin = ShortPrompts(ShortPromptsConfig(scorer="encoder"))
    with answers.tokenizer(reference_model) as llama:
        items = answers.app_items(app, [0, 1], llama)
        tokens = np.array(answers.app_items(asked, [1], llama)[0].prompt, np.int32)
        (expected,) = plugin.shortened(llama, tokens, [0.5])
        read, first = (
            llama.detokenize(one).decode() for one in (expected.tokens.tolist(), items[0].prompt)
        )
        found = Shorter(trained_encoder(), reference_model, kind).items(items, [1], 0.5)
        assert llama.detokenize(found[1].prompt).decode() == read.removeprefix("100-8")
        assert llama.detokenize(found[0].prompt).decode() == first
    assert len(items[1].prompt) // 3 < len(found[1].prompt) <= len(tokens) // 2
    plugin.llmaas_shutdown()

"""Decisions by a tiny model: what heads learn, what arms may use, and the study on small models."""

from __future__ import annotations

import json

import numpy as np
import pytest
from preparing import prepare
from tiny_encoders import N_EMBD, VOCABULARY, prompt_of, write_package

from llmaas_eval.data import chat_lines, packaged_lines
from llmaas_eval.prompts import decision_tables
from llmaas_eval.prompts.engine import opened
from llmaas_eval.prompts.gap import CONSTANT, ONE_LEVEL, ORACLE, PAPER, Cost
from llmaas_eval.prompts.recalls import as_passage, contexts
from llmaas_eval.tables import signed
from llmaas_plugins.short_prompts.encoder import model_file
from llmaas_plugins.short_prompts.encoder.body import read_body
from llmaas_plugins.short_prompts.encoder.model_file import (
    GENERAL,
    EncoderFile,
    Head,
    encoder_path,
)

torch = pytest.importorskip("torch", reason="make test-train installs it")
arms_of = pytest.importorskip("llmaas_eval.prompts.arms")
decision = pytest.importorskip("llmaas_eval.prompts.decision")
encoded = pytest.importorskip("llmaas_eval.prompts.encoded")
outcome_table = pytest.importorskip("llmaas_eval.prompts.outcome_table")
heads = pytest.importorskip("llmaas_eval.prompts.heads")
trained_top = pytest.importorskip("llmaas_eval.prompts.trained_top")

SHARES, LEVELS = (1.0, 0.5), (1.0, 0.5, 0.2)
SHAPE = len(SHARES), len(LEVELS), len(LEVELS)
COST = {level: Cost(level, level) for level in LEVELS}
HEADS = ["linear, plain", "linear, bottom", "linear, top"]


def made(n=160, seed=0):
    """Return prompts of two sorts that a feature tells: one bears narrow levels, one short ones."""
    chance = np.random.default_rng(seed)
    is_short = chance.random(n) < 0.5
    right = np.zeros((n, *SHAPE), bool)
    right[:, 0, 0, 0] = True
    right[is_short, 1, 0] = True
    right[~is_short, 0, 1] = True
    noise = chance.standard_normal((n, 3))
    features = {"plain": np.column_stack([is_short, noise]), "kept": noise}
    features |= {"bottom": noise, "top": noise, "kind": noise[:, :1]}
    halves, documents = np.arange(n) % 2, np.array([f"{i % 40}" for i in range(n)])
    kinds = np.full(n, "kind")
    return arms_of.Table(right.reshape(n, -1), SHARES, LEVELS, features, halves, kinds, documents)


@pytest.fixture(scope="module")
def table():
    return made()


@pytest.fixture(scope="module")
def _few_trials():
    """Let heads try one penalty, which takes less time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(heads.Chances, "penalties", (1e-4,))
        patch.setattr(heads.Softmaxes, "penalties", (1e-3,))
        yield


@pytest.fixture(scope="module")
def arms(table, _few_trials):
    return arms_of.judged(table, COST, [0.15])


def qualities(arms, limits):
    return {one.arm: one.quality for one in arms if one.limits == limits}


# -- heads -----------------------------------------------------------------------------------------


def test_each_setting_has_one_value_of_each_knob():
    found = heads.knobs(SHAPE)
    assert found.shape == (18, 2 + 3 + 3 + 1)
    assert (found.sum(axis=1) == 4).all()
    assert len(np.unique(found, axis=0)) == 18


def test_chances_learn_what_a_feature_tells(table):
    head = heads.Chances(table.groups(["plain"]), table.is_right, SHAPE)
    learn, judge = np.arange(0, 160, 2), np.arange(1, 160, 2)
    found = heads.crossfit(head, learn, table.documents)
    is_short = table.features["plain"][:, 0] == 1
    short, narrow = (
        found.outer.reshape(-1, *SHAPE)[judge][:, *at] for at in ((1, 0, 1), (0, 1, 1))
    )
    assert (short[is_short[judge]] > narrow[is_short[judge]]).all()
    assert (short[~is_short[judge]] < narrow[~is_short[judge]]).all()
    assert found.inner.shape == (80, 18)


def test_features_that_tell_nothing_do_little_harm(table):
    head = heads.Chances(table.groups(["top"]), table.is_right, SHAPE)
    learn, judge = np.arange(0, 160, 2), np.arange(1, 160, 2)
    found = heads.crossfit(head, learn, table.documents).outer[judge]
    means = np.broadcast_to(table.is_right[learn].mean(axis=0), found.shape)
    assert head.loss(found, judge) < 1.1 * head.loss(means, judge)


def test_a_head_is_not_judged_on_documents_that_it_learned_from():
    seen = []

    class Told:
        penalties = (1.0,)

        def learned(self, rows, _penalty):
            return lambda some: seen.append((set(rows), set(some))) or np.zeros((len(some), 1))

        def loss(self, _found, _rows):
            return 0.0

    documents = np.array([f"{i % 10}" for i in range(50)])
    heads.crossfit(Told(), np.arange(0, 50), documents)
    for rows, some in seen[:-1]:
        assert not {documents[i] for i in rows} & {documents[i] for i in some}
    assert len(seen) == 5


def test_softmaxes_learn_the_labels_of_each_promise(table):
    is_short = table.features["plain"][:, 0].astype(int)
    labels = np.stack([np.stack([is_short, 0 * is_short], 1), np.ones((160, 2), int)], axis=1)
    head = heads.Softmaxes(table.groups(["plain"]), np.eye(2), labels, (2, 3))
    found = head.learned(np.arange(80), 3e-4)(np.arange(80, 160))
    assert found.shape == (80, 2, 2, 3)
    assert found.sum(axis=(2, 3)) == pytest.approx(1, abs=1e-5)
    assert (found[:, 0, :, 0].argmax(axis=1) == is_short[80:]).mean() > 0.95
    assert (found[:, 1].reshape(80, -1).argmax(axis=1) == 4).all()


# -- arms ------------------------------------------------------------------------------------------


def test_a_feature_that_tells_the_sort_wins_the_gap(arms):
    found = qualities(arms, (80, 90))
    assert found[ORACLE].all()
    assert found[CONSTANT].mean() < 0.6
    assert found["linear, plain"].mean() > 0.95
    assert found["best of table and heads"].mean() > 0.95
    assert found["random"].mean() < found[CONSTANT].mean()


def test_the_tiny_models_time_counts_for_whole_prompts_too(table, arms):
    found = qualities(arms, (60, 80))
    # level 50 % of the whole prompt is only fast enough without the tiny model
    is_short = table.features["plain"][:, 0] == 1
    assert found["linear, top"][~is_short].max() == 0
    assert found["linear, plain"].max() == 1


def test_no_arm_is_better_than_the_oracle(arms):
    for limits in arms_of.LIMITS:
        found = qualities(arms, limits)
        assert set(found) > {CONSTANT, ORACLE, *HEADS}
        for quality in found.values():
            assert (quality <= found[ORACLE]).all()


@pytest.mark.usefixtures("_few_trials")
@pytest.mark.parametrize("seconds", [0.03, 0.99])
def test_the_paper_and_its_constant_have_one_level_for_prompt_and_answer(seconds):
    right = np.zeros((40, *SHAPE), bool)
    right[:, 0, 1, 2] = True  # two levels
    right[:20, 0, 2, 2] = True
    table = made(40)._replace(is_right=right.reshape(40, -1))
    found = qualities(arms_of.judged(table, COST, [seconds]), (60, 80))
    assert found[CONSTANT].all()
    assert found[ONE_LEVEL].mean() == found[PAPER].mean() == 0.5


def test_tables_resample_documents(arms):
    rows = [one._asdict() | {"quality": one.quality.tolist()} for one in arms]
    documents = [f"{i % 40}" for i in range(160)]
    output = {"settings": {"study": "decision", "documents": documents}, "rows": rows}
    agreement, gains, over_kinds = (make([output]) for make in decision_tables.TABLES.values())
    assert len(agreement.rows) == len(gains.rows) == len(over_kinds.rows) == len(arms_of.LIMITS) + 1
    column = gains.columns.index("linear, plain")
    assert gains.rows[0][column].endswith(" %")
    assert float(gains.rows[0][column].split(" (")[0]) > 30
    first = qualities(arms, arms_of.LIMITS[0])
    gain = signed(100 * (first[PAPER] - first[ONE_LEVEL]).mean(), 1)
    assert gains.rows[0][-1].startswith(f"{gain} ")
    with pytest.raises(ValueError, match="found 2 outputs"):
        decision_tables.TABLES["prompts-decision-gains"]([output, output])


# -- features --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def body(tmp_path_factory):
    return read_body(write_package(tmp_path_factory.mktemp("package")))


def test_padding_changes_no_features():
    states, is_piece = torch.randn(1, 40, 8), torch.ones(1, 40, dtype=torch.bool)
    alone = encoded.pooled(states, is_piece)
    padded = torch.cat([states, torch.full((1, 5, 8), 9.0)], dim=1)
    mask = torch.cat([is_piece, torch.zeros(1, 5, dtype=torch.bool)], dim=1)
    torch.testing.assert_close(encoded.pooled(padded, mask), alone)
    torch.testing.assert_close(alone[0, 8:], states[0, -24:].mean(0))


def test_features_are_finite_and_depend_on_the_prompt(body):
    features, found = encoded.Encoded(body).features, []
    for words in (["the", " train", " leaves", " at", " 9", "\n"], ["the", " red", " bus", " ?"]):
        one = features(prompt_of(words), np.full(len(words), 0.5, np.float32))
        assert len(one["bottom"]) == len(one["top"]) == 2 * N_EMBD
        assert all(np.isfinite(values).all() for values in one.values())
        found.append(one)
    assert not np.allclose(found[0]["top"], found[1]["top"])
    assert not np.allclose(found[0]["top"], found[0]["bottom"])
    assert found[0]["plain"][3] == pytest.approx(1 / 6)  # numbers


def test_plain_features_tell_the_form_of_the_question():
    words = ["Hi", ".", "\n", "Where", " is", " it", "?"]
    prompt = prompt_of(words)
    asked = type(prompt)(
        prompt.tokens, prompt.starts, prompt.words, prompt.is_protected, prompt.is_frequent, 3
    )
    assert encoded.plain(prompt)[-7:] == [0.0] * 7
    assert encoded.plain(asked)[-7:] == [0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 1.0]
    assert encoded.kept(asked, np.array([9, 0, 0, 0, 1, 0, 0], np.float32)) == pytest.approx(
        [10 / 7, 0.25, 1, 1, 1]
    )


def test_a_trained_top_learns_from_the_pieces(body):
    chance = np.random.default_rng(0)
    is_short = np.arange(64) % 2 == 0
    word = {True: VOCABULARY.index("train"), False: VOCABULARY.index("bus")}
    ids = [[2, *[word[bool(one)]] * int(chance.integers(4, 9)), 3] for one in is_short]
    right = np.zeros((64, *SHAPE), bool)
    right[is_short, 1] = True
    right[~is_short, 0] = True
    top = trained_top.TrainedTop(body, ids, right.reshape(64, -1), SHAPE)
    found = top.told(np.arange(48), np.arange(48, 64)).reshape(-1, *SHAPE)
    assert (found[:, 1, 0, 0] > found[:, 0, 0, 0]).tolist() == is_short[48:].tolist()
    assert body.n_layers > encoded.N_BOTTOM


# -- the study -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Return a folder in which all sets are the packaged conversations, two of them."""
    folder = tmp_path_factory.mktemp("data")
    talks = [line for lines in packaged_lines() for line in lines]
    rows = {"chat/sgd_dev": [], "tasks/qmsum_val20": [], "tasks/dialogsum_test": []}
    for some in (talks[::2], talks[1::2]):
        turns = [
            {"role": role.lower(), "content": content}
            for role, _, content in (line.partition(": ") for line in some)
        ]
        rows["chat/sgd_dev"].append({"turns": turns})
        rows["tasks/qmsum_val20"].append({"turns": turns})
        rows["tasks/dialogsum_test"].append({"dialogue": "\n".join(some)})
    for name, lines in rows.items():
        path = folder / f"{name}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(f"{json.dumps(row)}\n" for row in lines), encoding="utf-8")
    return folder


def test_questions_ask_for_each_fact_with_each_probe(light_model, data, tmp_path):
    model = prepare(light_model, tmp_path / "light.elastic.gguf")
    layout, asked = outcome_table.SIZES["layout"], []
    with opened(model, outcome_table.LONGEST) as engine:
        lines = chat_lines(data, "sgd_dev")
        told = {
            (half, one.probe, one.number): one
            for half in range(2)
            for one in contexts(engine, lines[half::2], 8, layout)
        }
        for half, passage in outcome_table.prompts(engine, data, 64):
            context = told.get((half, passage.kind, passage.document))
            if context is not None:
                questions = [as_passage(context, fact).prompt.tolist() for fact in range(2)]
                asked.append((half, passage.kind, questions.index(passage.prompt.tolist())))
    assert len(asked) == 16
    assert all(asked.count(one) == 2 for one in asked)


@pytest.fixture
def encoder(body, tmp_path, monkeypatch):
    """Let a tiny encoder be the general one; return a function that writes another one."""
    folder = write_package(tmp_path)
    monkeypatch.setattr(model_file, "DIRECTORY", tmp_path / "encoders")
    monkeypatch.setattr(decision, "body_folder", lambda: folder)
    encoder_path(GENERAL).parent.mkdir()

    def write(seed):
        weight = np.random.default_rng(seed).standard_normal((2, N_EMBD)).astype(np.float32)
        EncoderFile.write(encoder_path(GENERAL), body, {}, Head(weight, np.zeros(2, np.float32)))

    write(0)
    return write


@pytest.mark.slow
@pytest.mark.usefixtures("_few_trials")
def test_the_study_measures_each_prompt_once(encoder, light_model, data, tmp_path, capsys):
    model = prepare(light_model, tmp_path / "light.elastic.gguf")
    arguments = ["-n", "8", "--model", str(model), "--data", str(data), "-o", str(tmp_path)]
    assert decision.main([*arguments, "--trained-top"]) == 0
    first = json.loads((tmp_path / "decision.json").read_text())
    files = sorted((tmp_path / "kept").iterdir())
    assert len(files) == 8
    for number, path in enumerate(files):
        (row,) = json.loads(path.read_text())
        assert row["is_right"][0][0][0], number
        assert np.shape(row["is_right"]) == (4, 6, 6)
    halves = {name.split()[0] for name in first["settings"]["documents"]}
    assert halves == {"0", "1"}
    assert "facts" in first["settings"]["kinds"]
    assert {"trained top", CONSTANT, ORACLE} < {row["arm"] for row in first["rows"]}
    assert "prompts-decision-gains" in capsys.readouterr().out
    encoder(1)  # it learned again
    assert decision.main(arguments) == 0
    assert len(list((tmp_path / "kept").iterdir())) == 16

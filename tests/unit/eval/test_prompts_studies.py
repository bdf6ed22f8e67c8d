"""The studies of shorter prompts on a small random model: what they read, and what they keep."""

from __future__ import annotations

import json

import numpy as np
import pytest
from leveled import write_times
from preparing import prepare
from tiny_encoders import N_EMBD, write_package

from llmaas_eval.data import packaged_lines
from llmaas_eval.prompts import break_even, continuation, facts, narrow_recall, oracle_gap
from llmaas_eval.prompts.engine import opened
from llmaas_eval.prompts.passages import KINDS, conversations, passages
from llmaas_eval.prompts.recalls import Layout, as_passage, contexts
from llmaas_eval.prompts.scorers import ORACLE, UNTRAINED, WHOLE_MODEL, Material, scorers_of
from llmaas_eval.prompts.words import only_question, words_of
from llmaas_hooks import ConfigError
from llmaas_plugins.short_prompts.encoder import model_file
from llmaas_plugins.short_prompts.encoder.body import read_body
from llmaas_plugins.short_prompts.encoder.model_file import (
    GENERAL,
    EncoderFile,
    Head,
    encoder_path,
)

WITHOUT_TORCH = [name for name in UNTRAINED if name != ORACLE]
STUDIES = {
    "narrow_recall": (narrow_recall, []),
    "oracle_gap": (oracle_gap, []),
    "facts": (facts, ["--scorers", "random", "attention", "--facts", "1"]),
    "continuation": (continuation, ["--scorers", *WITHOUT_TORCH]),
}


@pytest.fixture(scope="module")
def model(light_model, tmp_path_factory):
    return prepare(light_model, tmp_path_factory.mktemp("prompts") / "light.elastic.gguf")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Return a folder in which all sets are the packaged conversations, some after another."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "chat").mkdir()
    (folder / "tasks").mkdir()
    talks = [line for lines in packaged_lines() for line in lines]
    turns = [
        {"role": role.lower(), "content": content}
        for role, _, content in (line.partition(": ") for line in talks)
    ]
    rows = {
        "chat/sgd_dev": {"turns": turns},
        "tasks/qmsum_val20": {"turns": turns},
        "tasks/dialogsum_test": {"dialogue": "\n".join(talks)},
    }
    for name, row in rows.items():
        (folder / f"{name}.jsonl").write_text(f"{json.dumps(row)}\n", encoding="utf-8")
    return folder


@pytest.fixture
def engine(model):
    with opened(model, 512) as engine:
        yield engine


def test_cells_before_a_cut_stay_and_levels_hold_for_one_batch(engine):
    tokens = engine.tokens("User: Where does Anna live?\nAssistant: Anna lives in Rome.\n")
    whole = engine.read(tokens)
    assert engine.prefill(tokens) == pytest.approx(whole[-1:], abs=0.02)
    assert engine.read(tokens[5:], at=5) == pytest.approx(whole[5:], abs=0.02)
    narrow = engine.read(tokens, 0.2)
    assert np.abs(narrow - whole).mean() > 0.1
    engine.prefill(tokens[:5], 0.2)
    mixed = engine.read(tokens[5:], 1.0, 5)
    assert np.abs(mixed - whole[5:]).mean() > 0.02  # narrow cells of the beginning
    assert "".join(engine.pieces(tokens)).strip().startswith("User: Where does Anna live?")


def test_every_scorer_scores_each_word(engine):
    tokens = engine.tokens("User: The code of the gate is 12.\nAssistant: Okay.\nUser: Code?\n")
    prompt = only_question(words_of(engine, tokens), 6)
    material = Material(engine, engine.tokens(" 12"))
    scorers = scorers_of(engine, WITHOUT_TORCH)
    assert list(scorers) == WITHOUT_TORCH
    found = {name: score(prompt, material) for name, score in scorers.items()}
    assert {one.shape for one in found.values()} == {(len(prompt.words),)}
    assert all(np.isfinite(one).all() and np.ptp(one) > 0 for one in found.values())
    assert found["first"].argmax() == 0
    assert found["last"].argmin() == 0
    assert not np.allclose(found[WHOLE_MODEL], found["self_information"])  # at another level


def test_the_encoder_is_a_scorer_where_one_was_trained(engine, tmp_path, monkeypatch):
    monkeypatch.setattr(model_file, "DIRECTORY", tmp_path / "encoders")
    with pytest.raises(ConfigError, match="llmaas prompts learn"):
        scorers_of(engine, ["encoder"])
    body = read_body(write_package(tmp_path / "package"))
    chance = np.random.default_rng(0)
    weight = chance.standard_normal((2, N_EMBD)).astype(np.float32)
    path = encoder_path(GENERAL)
    path.parent.mkdir()
    EncoderFile.write(path, body, {}, Head(weight, np.zeros(2, np.float32)))
    prompt = words_of(engine, engine.tokens("User: the train leaves at nine from platform two\n"))
    (score,) = scorers_of(engine, ["encoder"]).values()
    found = score(prompt, Material(engine, prompt.tokens[:1]))
    assert found.shape == (len(prompt.words),)
    assert np.isfinite(found).all()
    assert np.ptp(found) > 0


def test_scorers_leave_the_cells_as_they_were(engine):
    tokens = engine.tokens("User: The code of the gate is 12.\nAssistant: Okay.\nUser: Code?\n")
    expected = engine.read(tokens)[6:]
    engine.prefill(tokens[:6])
    prompt = words_of(engine, tokens)
    scorers_of(engine, ["attention"])["attention"](prompt, Material(engine, tokens))
    assert engine.read(tokens[6:], at=6) == pytest.approx(expected, abs=0.02)


@pytest.mark.parametrize("most_before", [0, 400])
def test_questions_know_how_far_their_fact_is(engine, most_before):
    layout = Layout(3, (300, 400), 400, most_before)
    found = list(contexts(engine, packaged_lines(), 2, layout))
    assert [one.probe for one in found] == ["facts", "alike", "facts", "alike"]
    for context in found:
        for question, asked in enumerate(context.asked):
            one = as_passage(context, question)
            text = "".join(engine.pieces(one.prompt))
            answer = "".join(engine.pieces(asked.answer)).strip()
            before = "".join(engine.pieces(one.prompt[: -asked.distance]))
            stem = text.rpartition("Assistant: ")[2].lower()
            assert before.lower().endswith(f"{stem} {answer.lower()}")
            assert len(one.prompt) <= layout.longest + one.n_question


def test_facts_may_be_anywhere(engine):
    layout = Layout(1, (100, 900), 500, 900)
    found = list(contexts(engine, packaged_lines(), 12, layout, ["facts"]))
    places = [1 - one.asked[0].distance / len(one.tokens) for one in found]
    assert min(places) < 0.35
    assert max(places) > 0.6


def test_passages_end_where_a_speaker_begins(engine, data):
    found = list(passages(engine, conversations(data), 6, (64, 128), 8))
    assert [one.kind for one in found] == [*KINDS, *KINDS]
    for one in found:
        assert 64 <= len(one.prompt) <= 128
        assert len(one.rest) == 8
        assert one.n_question <= len(one.prompt) / 4
        pieces = engine.pieces(one.prompt)
        assert pieces[-1] == ":"
        assert one.n_question == len(one.prompt) or pieces[-one.n_question - 1] == "\n"


@pytest.mark.slow
@pytest.mark.parametrize("name", STUDIES)
def test_a_study_keeps_what_it_measures(name, model, data, tmp_path, capsys):
    study, more = STUDIES[name]
    arguments = ["--quick", "--model", str(model), "--data", str(data), "-o", str(tmp_path), *more]
    assert study.main(arguments) == 0
    first = json.loads((tmp_path / f"{name}.json").read_text())
    kept = sorted((tmp_path / "kept").iterdir())
    assert first["rows"]
    assert "|---" in capsys.readouterr().out
    for path in kept:
        path.write_text("[]")
    assert study.main(arguments) == 0
    assert json.loads((tmp_path / f"{name}.json").read_text())["rows"] == []  # none again
    assert sorted((tmp_path / "kept").iterdir()) == kept


def test_the_whole_setting_agrees_with_itself(model, data, tmp_path):
    arguments = ["--quick", "--model", str(model), "--data", str(data), "-o", str(tmp_path)]
    assert oracle_gap.main(arguments) == 0
    rows = json.loads((tmp_path / "oracle_gap.json").read_text())["rows"]
    assert [row["leads"][0][0][0] for row in rows] == [4] * 4


def test_the_break_even_needs_measured_times(model, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("llmaas_plugins.elastic.latency.DIRECTORY", tmp_path / "latency")
    arguments = [str(model), "--lengths", "100", "2000", "-o", str(tmp_path)]
    with pytest.raises(SystemExit):
        break_even.main(arguments)
    assert "has no times; `llmaas elastic profile " in capsys.readouterr().err
    write_times(model)  # a token takes a second at the whole level, and 0.2 at the narrowest
    assert break_even.main([*arguments, "--encoder", "50:25000", "200:240000"]) == 0
    rows = json.loads((tmp_path / "break_even.json").read_text())["rows"]
    assert [(row["n_tokens"], row["scorer"], row["share"]) for row in rows] == [
        (100, "narrow attention", 0.79), (100, "encoder", 0.03),
        (2000, "narrow attention", 0.79), (2000, "encoder", None),
    ]  # fmt: skip
    assert [row["scorer_ms"] for row in rows[1::2]] == pytest.approx([96_667, 2_400_000], rel=1e-4)
    assert [row["is_measured"] for row in rows] == [True, True, False, False]
    assert "| never |" in capsys.readouterr().out

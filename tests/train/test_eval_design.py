"""Parts of ElastiLM's design, and words by tiny models: choices, stretches and tables."""

from __future__ import annotations

import json
from collections import deque
from dataclasses import replace

import numpy as np
import pytest
from preparing import prepare
from tiny_encoders import N_EMBD, write_package

from llmaas_eval.data import packaged_lines
from llmaas_eval.elastic.prepared import write_uniform
from llmaas_eval.prompts import design_tables, word_scorer_tables
from llmaas_eval.prompts.design_outcomes import (
    FINE,
    LEVELS,
    SHARES,
    Outcomes,
    costs_of,
    in_steps,
    limited,
    parts,
    steps,
    strategies,
)
from llmaas_eval.prompts.engine import opened
from llmaas_eval.prompts.gap import settings
from llmaas_eval.prompts.stretches import CLAUSE, SENTENCE, begins_of, by_stretch
from llmaas_eval.prompts.words import shortened, words_of
from llmaas_eval.tables import NoRowsError
from llmaas_plugins.elastic.metadata import order_in, read_elastic
from llmaas_plugins.elastic.prepared_file import write_prepared
from llmaas_plugins.elastic.reordering import order_by
from llmaas_plugins.elastic.units import Calibration, Scores, blocks_of
from llmaas_plugins.model.gguf_header import read_header
from llmaas_plugins.short_prompts.encoder.body import read_body
from llmaas_plugins.short_prompts.encoder.model_file import EncoderFile, Head
from llmaas_plugins.short_prompts.scorer import Prompt

torch = pytest.importorskip("torch", reason="make test-train installs it")
design = pytest.importorskip("llmaas_eval.prompts.design")
design_files = pytest.importorskip("llmaas_eval.prompts.design_files")
tiny = pytest.importorskip("llmaas_eval.prompts.tiny_encoders")
word_scorers = pytest.importorskip("llmaas_eval.prompts.word_scorers")

COSTS = [(n / 10, [n / 10, n / 10]) for n in range(10, 1, -1)]
"""Times that are proportional to the level."""
N = 8


def outcome(number, design, is_right, kind="meetings"):
    return {
        "number": number, "design": design, "half": number % 2, "kind": kind,
        "document": str(number), "is_right": is_right,
    }  # fmt: skip


def in_all_steps(is_right):
    """Return a prompt's outcomes by share and level."""
    return [[is_right(share, level) for level in FINE] for share in FINE]


def with_design(is_right):
    return [
        [[is_right(*one) for one in settings([s], [p], LEVELS)] for p in LEVELS] for s in SHARES
    ]


# -- stretches -------------------------------------------------------------------------------------


def test_the_best_stretch_is_kept_first_and_the_next_one_fills_the_room():
    starts = np.array([0, 1, 3, 4, 6, 9, 10], np.int32)
    nothing = np.zeros(6, bool)
    prompt = Prompt(np.arange(10, dtype=np.int32), starts, tuple("abcdef"), nothing, nothing, 6)
    begins = np.array([True, False, True, False, True, False])
    scores = np.array([9, 0, 4, 5, 1, 2], np.float32)
    found = by_stretch(prompt, scores, begins)
    assert found.tolist() == pytest.approx([3, 3, 14 / 3, 14 / 3, 1.25, 1.25])
    assert shortened(prompt, scores, 0.4).tolist() == [0, 3, 4, 5]
    assert shortened(prompt, found, 0.4).tolist() == [0, 3, 4, 5]
    assert shortened(prompt, found, 0.6).tolist() == [0, 1, 2, 3, 4, 5]
    begins[0] = False
    assert by_stretch(prompt, scores, begins).tolist() == found.tolist()


def test_sentences_and_clauses_begin_after_their_signs(model):
    with opened(model, 64) as engine:
        text = "Anna: The gate is shut, the code is 12. Yes.\nBob: Why?"
        prompt = words_of(engine, engine.tokens(text))
        found = {}
        for unit in (SENTENCE, CLAUSE):
            places = np.flatnonzero(begins_of(prompt, unit, engine.llama))[1:]
            found[unit] = ["".join(part).strip() for part in np.split(prompt.words, places)]
    assert "the code is 12." in found[CLAUSE]
    assert not any(one.startswith("the code") for one in found[SENTENCE])
    for stretches in found.values():
        assert "Yes." in stretches
        assert "".join("".join(found[SENTENCE]).split()) == "".join("".join(stretches).split())


# -- designs ---------------------------------------------------------------------------------------


def test_costs_between_levels_are_interpolated():
    found = costs_of(COSTS)
    assert list(found) == list(FINE)
    assert found[0.35] == pytest.approx((0.35, 0.35))


def test_a_setting_is_chosen_on_the_other_half():
    """The first setting suits one half, and the second one the other: both choose wrongly."""
    right = np.array([[1.0, 0.0], [0.0, 1.0]] * 4)
    halves, kinds = np.arange(N) % 2, np.array(["a"] * N)
    of = Outcomes(right, settings([1.0], [1.0, 0.5], [1.0]), halves, kinds, kinds)
    mask = np.ones(2, bool)
    assert of.constant(mask).tolist() == [0] * N
    assert of.oracle(mask).tolist() == [1] * N
    assert of.random(mask).tolist() == [0.5] * N
    assert of.constant(np.array([True, False])).tolist() == [1, 0] * 4
    assert of.constant(~mask) is None
    by_kind = of._replace(right=np.array([[1.0, 0.0]] * 4 + [[0.0, 1.0]] * 4),
                          kinds=np.array(["a"] * 4 + ["b"] * 4))  # fmt: skip
    assert by_kind.by_kind(mask).tolist() == [1] * N


def test_finer_steps_and_strategies_differ_where_only_one_setting_is_right():
    """Only 35 % of the prompt with the whole model is right; in larger steps nothing is."""
    rows = [
        outcome(i, "steps", in_all_steps(lambda share, level: (share, level) == (0.35, 1.0)))
        for i in range(N)
    ]
    found = steps(rows, costs_of(COSTS), (40, 100))
    assert {size: float(values[0].mean()) for size, values in found.items()} == {20: 0, 10: 0, 5: 1}
    rows = [
        outcome(i, "steps", in_all_steps(lambda share, level: (share, level) == (0.5, 0.8)))
        for i in range(N)
    ]
    values = strategies(rows, costs_of(COSTS), (50, 80))
    means = {name: float(one.mean()) for name, one in values.items()}
    assert means["best constant"] == means["best by kind"] == means["oracle"] == 1
    assert means["widest model, then most of the prompt"] == 1
    assert means["most of the prompt, then widest model"] == 0
    assert 0 < means["random"] < 0.2
    lines = design_tables.TABLES["prompts-equal-times"]([output("design", rows)]).rows
    assert [line[:2] for line in lines[:4]] == [
        ["35 %", "100 %"], ["45 %", "80 %"], ["70 %", "50 %"], ["100 %", "40 %"],
    ]  # fmt: skip


def test_the_tiny_models_time_counts_where_words_are_left_out():
    rows = [outcome(0, "steps", in_all_steps(lambda *_: True))]
    of = in_steps(rows)
    may = limited(of, costs_of(COSTS), (50, 100))
    found = {one[:2] for one, is_in in zip(of.some, may, strict=True) if is_in}
    assert (1.0, 0.5) in found
    assert (0.5, 1.0) not in found
    assert (0.45, 1.0) in found


def test_parts_are_compared_with_the_whole_design():
    def whole(share, prefill, decode):
        return share == 0.5

    rows = [
        outcome(i, design, with_design(is_right))
        for design, is_right in (
            ("all", whole), ("score head", lambda *_: False), ("recovery", whole),
            ("reordering", whole),
        )
        for i in range(N)
    ]  # fmt: skip
    found = parts(rows, costs_of(COSTS), (60, 80))
    means = {name: float(values.mean()) for name, values in found.items()}
    assert means["all"] == means["recovery"] == means["separate levels"] == 1
    assert means["score head"] == means["shorter prompts"] == 0
    assert 0 < means["decision"] < 1
    assert parts(rows, costs_of(COSTS), (19, 50))["shorter prompts"] is None
    table = design_tables.TABLES["prompts-design-parts"]([output("design", rows)])
    with pytest.raises(NoRowsError):
        design_tables.TABLES["prompts-strategies"]([output("design", rows)])
    assert table.rows[-1][:3] == [
        "all", "100.0 % (100.0–100.0)", "−100.0 (−100.0 to −100.0)",
    ]  # fmt: skip
    assert "impossible" not in table.rows[-1]


# -- words -----------------------------------------------------------------------------------------


def output(study, rows, **found):
    return {"settings": {"study": study, "costs": COSTS, **found}, "rows": rows}


def test_tiny_models_are_compared_at_equal_tokens_and_in_equal_time():
    encoders = [
        tiny.Encoder(tiny.Size(6, 3), None, 10_000_000, 0.8),
        tiny.Encoder(tiny.Size(2, 1), None, 4_000_000, 0.7),
    ]
    ways = list(word_scorers.shortenings(encoders))
    timed = {(one.scorer, one.share): one.tokens for one in ways if one.is_timed}
    assert timed["6 layers, 3 shared", 0.5] == pytest.approx(0.45)
    assert timed["2 layers, 1 shared", 0.5] == pytest.approx(0.48)
    rows = [
        one._asdict() | {
            "number": i, "document": str(i), "kept": one.tokens,
            "kl": 0.1 if one.scorer[0] == "6" else 0.2,
            "agrees": one.scorer[0] == "6" or one.unit != word_scorers.BY_WORD,
        }
        for one in ways
        for i in range(N)
    ]  # fmt: skip
    sizes = [
        {"scorer": str(one.size), "n_active": one.n_active, "auc": one.auc} for one in encoders
    ]
    found = [output("word_scorers", rows, sizes=sizes)]
    lines = word_scorer_tables.TABLES["prompts-tiny-sizes"](found).rows
    assert lines[0] == ["6 layers, 3 shared", "10.0 M", "80.0 %", *["0.100"] * 4]
    assert lines[1][3] == "0.200, +0.100 (+0.100 to +0.100)"
    lines = word_scorer_tables.TABLES["prompts-words-by-share"](found).rows
    assert {line[1] for line in lines} >= {"score head", word_scorers.ATTENTION, "random"}
    lines = word_scorer_tables.TABLES["prompts-score-head"](found).rows
    assert lines[0][:3] == ["agree", "90 %", "+100.0 (+100.0 to +100.0)"]
    lines = word_scorer_tables.TABLES["prompts-stretches"](found).rows
    by_attention = [line for line in lines if line[0] == word_scorers.ATTENTION]
    assert {line[4] for line in by_attention} == {"+100.0 (+100.0 to +100.0)"}


# -- files and studies -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(light_model, tmp_path_factory):
    return prepare(light_model, tmp_path_factory.mktemp("design") / "light.elastic.gguf")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Return a folder in which all sets are the packaged conversations, two of them."""
    folder = tmp_path_factory.mktemp("data")
    talks = [line for lines in packaged_lines() for line in lines]
    names = ("chat/sgd_dev", "tasks/qmsum_val20", "tasks/dialogsum_test", "tasks/dialogsum_dev")
    rows = {name: [] for name in names}
    for some in (talks[::2], talks[1::2]):
        turns = [
            {"role": role.lower(), "content": content}
            for role, _, content in (line.partition(": ") for line in some)
        ]
        rows["chat/sgd_dev"].append({"turns": turns})
        rows["tasks/qmsum_val20"].append({"turns": turns})
        talk = "\n".join(some)
        rows["tasks/dialogsum_test"].append({"dialogue": talk})
        rows["tasks/dialogsum_dev"].append({"dialogue": talk, "summary": talk[:40]})
    for name, lines in rows.items():
        path = folder / f"{name}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(f"{json.dumps(row)}\n" for row in lines), encoding="utf-8")
    return folder


@pytest.fixture(scope="module", params=[False, True], ids=["blocks", "one by one"])
def ordered(light_model, tmp_path_factory, request):
    """Return a prepared file whose units have a random order."""
    chance, blocks = np.random.default_rng(0), blocks_of(light_model)
    scores = Scores(
        groups=chance.random((blocks.n_layers, blocks.n_groups), np.float32),
        neurons=chance.random((blocks.n_layers, blocks.n_ff), np.float32),
        layers=chance.random(blocks.n_layers),
        calibration=Calibration("0" * 64, 0, 0, "none"),
    )
    path = tmp_path_factory.mktemp("ordered") / "ordered.elastic.gguf"
    write_uniform(light_model, path, scores)
    if request.param:  # neurons of a block have moved apart
        elastic = read_elastic(path)
        by_one = order_by(replace(elastic.blocks, granule=1), scores)
        elastic = replace(elastic, source=None)
        deque(write_prepared(light_model, path, elastic, by_one, takes_blocks_apart=True), 0)
    return path


def test_the_own_order_gives_other_levels_and_the_same_whole_model(light_model, ordered, tmp_path):
    own = design_files.unordered(light_model, ordered, tmp_path / "own.gguf")
    elastic, prepared = read_elastic(own), read_elastic(ordered)
    assert elastic.tables["uniform"][-1].neurons.tolist() == (
        prepared.tables["uniform"][-1].neurons.tolist()
    )
    assert (np.diff(order_in(read_header(own), elastic.blocks).neurons, axis=1) == 1).all()
    found = []
    for path in (ordered, own):
        with opened(path, 64) as engine:
            tokens = engine.tokens("User: Where does Anna live?\nAssistant: In Rome.\n")
            found.append([engine.read(tokens, level) for level in (1.0, 0.4)])
    assert found[0][0] == pytest.approx(found[1][0], abs=0.2)  # ffn_down was quantized again
    assert np.abs(found[0][1] - found[1][1]).mean() > 0.05


def test_finer_levels_keep_the_order(light_model, ordered, tmp_path):
    fine = design_files.in_steps(light_model, ordered, FINE, tmp_path / "fine.gguf")
    elastic, prepared = read_elastic(fine), read_elastic(ordered)
    assert elastic.levels == FINE
    by_one = replace(elastic.blocks, group_granule=1, granule=1)
    orders = [order_in(read_header(path), by_one).neurons for path in (fine, ordered)]
    assert (orders[0] == orders[1]).all()
    by_level = dict(zip(prepared.levels, prepared.tables["uniform"], strict=True))
    assert elastic.tables["uniform"][10].neurons.tolist() == by_level[0.5].neurons.tolist()


@pytest.mark.slow
def test_the_study_of_words_learns_and_measures_once(model, data, tmp_path, monkeypatch, capsys):
    folder = write_package(tmp_path)
    monkeypatch.setattr(word_scorers, "body_folder", lambda: folder)
    monkeypatch.setattr(word_scorers, "SIZES", (word_scorers.DEFAULT, tiny.Size(2, 1)))
    arguments = ["--quick", "--model", str(model), "--data", str(data), "-o", str(tmp_path)]
    assert word_scorers.main([*arguments, "--pictures", str(tmp_path)]) == 0
    first = json.loads((tmp_path / "word_scorers.json").read_text())
    kept = sorted((tmp_path / "kept").iterdir())
    assert len([path for path in kept if path.suffix == ".gguf"]) == 2
    assert all(row["kept"] <= max(row["tokens"], 0.25) + 0.01 for row in first["rows"])
    assert "prompts-stretches" in capsys.readouterr().out
    assert (tmp_path / "prompts-words-by-share.png").exists()
    assert word_scorers.main(arguments) == 0
    assert sorted((tmp_path / "kept").iterdir()) == kept
    assert json.loads((tmp_path / "word_scorers.json").read_text())["rows"] == first["rows"]


@pytest.mark.slow
def test_the_study_of_parts_measures_each_design(light_model, model, data, tmp_path):
    body = read_body(write_package(tmp_path))
    encoder = tmp_path / "encoder.gguf"
    weight = np.random.default_rng(0).standard_normal((2, N_EMBD)).astype(np.float32)
    EncoderFile.write(encoder, body, {}, Head(weight, np.zeros(2, np.float32)))
    arguments = ["-n", "4", "--steps-n", "4", "--model", str(model), "--source", str(light_model)]
    arguments += ["--encoder", str(encoder), "--tokens", "0"]
    arguments += ["--data", str(data), "-o", str(tmp_path)]
    assert design.main([*arguments, "--pictures", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "design.json").read_text())["rows"]
    by_design = {row["design"]: np.array(row["is_right"]) for row in rows}
    assert {name: one.shape for name, one in by_design.items()} == {
        "all": (4, 6, 6), "score head": (4, 6, 6), "reordering": (4, 6, 6),
        "steps": (17, 17),
    }  # fmt: skip
    assert "prompts-design-parts" in (tmp_path / "design.md").read_text()
    assert (tmp_path / "prompts-design.png").exists()

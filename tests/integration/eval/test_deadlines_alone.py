"""The study of one promise on whole sets, with answers of the packaged model and real files."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from preparing import prepare

from llmaas_eval.deadlines.alone import cli, overhead, variants
from llmaas_eval.deadlines.alone.answering import OURS, PAIRS, WHOLE, Asked, answers
from llmaas_eval.deadlines.loaded.answers import app_items, tokenizer
from llmaas_eval.deadlines.loaded.questions import AppQuestions, Question
from llmaas_eval.deadlines.model import write_model
from llmaas_eval.elastic.prepared import write_uniform
from llmaas_eval.models import SHAPE_TINY
from llmaas_plugins.elastic.uniform import LEVELS
from llmaas_plugins.elastic.units import Calibration, Scores, blocks_of

NARROWEST = len(LEVELS) - 1
APP = AppQuestions(
    "Question: Who sings?\nAnswer: the bird\n",
    [
        Question("Who flies?", ("a bird in the sky", "the stone", "no"), 0),
        Question("Who is late for the train?", ("my friend", "the moon", "no"), 0),
    ],
)


@pytest.fixture(scope="module")
def asked(reference_model, tmp_path_factory):
    """Return a model with two questions, and the folder where it is prepared.

    The model itself stands for smaller ones, as if it had been trained from scratch.
    """
    folder = tmp_path_factory.mktemp("alone")
    (folder / "models").mkdir()
    path = folder / "models" / f"{reference_model.stem}.elastic.gguf"
    prepare(reference_model, path, tables=("uniform",))
    with tokenizer(reference_model) as llama:
        items = app_items(APP, [0, 1], llama)
    scratch = dict.fromkeys(LEVELS[1:], reference_model)
    return Asked("packaged", reference_model, {"Rewind": items}, scratch, ["PFS"]), folder


@pytest.mark.slow
def test_answers_are_of_all_settings_and_kept(asked):
    of, folder = asked
    found = answers(of, folder)["Rewind"]
    assert {*found} == {OURS, "PFS"}
    assert {*found[OURS]} == {*PAIRS}
    narrow = found[OURS][NARROWEST, NARROWEST].nats
    assert np.abs(narrow - found[OURS][WHOLE].nats).min() > 0.01
    assert {*found["PFS"]} == {(i, i) for i in range(len(LEVELS))}
    for scores in found["PFS"].values():
        assert scores.nats == pytest.approx(found[OURS][WHOLE].nats, rel=0.03)
    kept = {path: path.stat().st_mtime_ns for path in (folder / "answers").iterdir()}
    again = answers(of, folder)["Rewind"]
    assert {path: path.stat().st_mtime_ns for path in (folder / "answers").iterdir()} == kept
    assert again[OURS][NARROWEST, NARROWEST].nats.tolist() == narrow.tolist()


def test_the_order_of_units_is_compared_without_compensation(light_model, tmp_path):
    path = prepare(light_model, tmp_path / "light.elastic.gguf", biases=("uniform",))
    of = Asked("light", light_model, {}, {}, [])
    ours, reordered, own = (
        replace(of, is_compensated=is_compensated, is_reordered=is_reordered).ours(path)
        for is_compensated, is_reordered in ((True, True), (False, True), (False, False))
    )
    assert ours.biases
    assert not reordered.biases
    assert not own.biases
    assert ours.path == reordered.path == path
    assert own.path == light_model
    assert [level.neurons.tolist() for level in reordered.levels] == [
        level.neurons.tolist() for level in own.levels
    ]


@pytest.mark.slow
def test_units_can_stay_in_their_own_order(asked, reference_model, tmp_path):
    of, _ = asked
    blocks = blocks_of(reference_model)
    scores = Scores(
        np.tile(np.arange(blocks.n_groups, dtype=np.float64), (blocks.n_layers, 1)),
        np.tile(np.arange(blocks.n_ff, dtype=np.float64), (blocks.n_layers, 1)),
        Calibration("0" * 64, 0, 0, "none"),
    )  # the last units count most, so that the order is reversed
    (tmp_path / "models").mkdir()
    write_uniform(reference_model, tmp_path / "models" / f"{of.path.stem}.elastic.gguf", scores)
    arms = [
        replace(
            of, name=str(is_reordered), methods=[], settings={"Rewind": [WHOLE, (4, 4)]},
            is_reordered=is_reordered,
        )
        for is_reordered in (True, False)
    ]  # fmt: skip
    reordered, own = (answers(arm, tmp_path)["Rewind"][OURS] for arm in arms)
    assert np.abs(reordered[4, 4].nats - own[4, 4].nats).min() > 0.01
    assert reordered[WHOLE].nats == pytest.approx(own[WHOLE].nats, rel=0.02)


@pytest.mark.slow
def test_shorter_prompts_keep_their_questions(asked):
    of, folder = asked
    items = of.sets["Rewind"]
    prepared = folder / "models" / f"{of.path.stem}.elastic.gguf"
    found = variants.shorter(prepared, of.sets, {"Rewind": [10, 12]}, "attention", 0.7)["Rewind"]
    for short, item, n in zip(found, items, (10, 12), strict=True):
        assert short.prompt[-n:] == [*item.prompt[-n:]]
        assert short.prompt[0] == item.prompt[0]
        assert len(short.prompt) <= 0.7 * len(item.prompt) + 1
        assert short._replace(prompt=item.prompt) == item


@pytest.mark.slow
def test_a_check_leaves_nothing_that_a_study_would_take_for_its_own(tmp_path):
    assert cli.main(["--quick", "--parts", "switching", "--out", str(tmp_path)]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["quick"]
    assert (tmp_path / "quick" / "alone.json").exists()


@pytest.mark.slow
def test_switches_of_ours_and_loads_of_files_are_timed(tmp_path):
    model = write_model(tmp_path, SHAPE_TINY)
    rows = list(overhead.switching(model, tmp_path / "files", 1))
    ways = {row["way"] for row in rows}
    assert ways == {overhead.SWITCHED, overhead.STAYING, overhead.FROM_CACHE, overhead.FROM_DISK,
                    overhead.COPIED}  # fmt: skip
    loads = {row["level"]: row for row in rows if row["way"] == overhead.FROM_CACHE}
    assert {*loads} == {*LEVELS}
    assert loads[0.2]["file_bytes"] < loads[1.0]["file_bytes"]
    switched = [s for row in rows if row["way"] == overhead.SWITCHED for s in row["seconds"]]
    loaded = [s for row in loads.values() for s in row["seconds"]]
    assert len(switched) == 40
    assert 0 < np.median(switched) < np.median(loaded)

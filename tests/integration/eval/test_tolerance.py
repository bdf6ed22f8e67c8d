"""Restored contexts measured on the reference model: their loss, and that nothing else changes."""

from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
import pytest
from gguf import GGUFReader

from llmaas_eval.data import packaged_lines
from llmaas_eval.tolerance.arms import Arm, ask, go_on, layer_damage
from llmaas_eval.tolerance.cli import main
from llmaas_eval.tolerance.coded import Coded
from llmaas_eval.tolerance.engine import Engine
from llmaas_eval.tolerance.outcome import compare
from llmaas_eval.tolerance.recall import Question, Recall
from llmaas_eval.tolerance.texts import packaged_samples
from llmaas_eval.weights import f16_copy, read_weights


@pytest.fixture
def data(tmp_path):
    """Return a data folder with a small encyclopedia."""
    paragraphs = [" ".join(lines) for lines in packaged_lines()]
    (tmp_path / "lm").mkdir()
    text = "\n \n".join(paragraphs)
    (tmp_path / "lm" / "wikitext2_valid.txt").write_text(text, encoding="utf-8")
    return tmp_path


@pytest.fixture
def engine(reference_model):
    with Engine(reference_model, n_ctx=256) as engine:
        yield engine


@pytest.fixture
def sample(engine):
    return next(packaged_samples(engine.tokens, n_context=160, n_rest=20))


def test_cells_as_they_were_change_nothing(engine, sample):
    blob = engine.prefill(sample.context).blob
    first, again = (engine.go_on(blob, sample.rest[:-1]) for _ in range(2))
    found = compare(first, again, sample.rest)
    assert (found.kl, found.attention_error, found.surprise, found.top1) == (0, 0, 0, 1)
    assert first.attention.shape == (8, len(sample.rest) - 1, 256)


def test_what_fills_a_tile_changes_nothing_before_it(engine, sample):
    blob = engine.prefill(sample.context).blob
    more, fewer = (engine.go_on(blob, sample.rest[:n]).log_p for n in (19, 5))
    assert np.array_equal(more[:5], fewer)


def test_fewer_bits_lose_more(engine, sample):
    prefilled = engine.prefill(sample.context)
    coded = Coded(prefilled.blob)
    exact = engine.go_on(prefilled.blob, sample.rest[:-1])
    found = [
        compare(exact, engine.go_on(coded.restored(np.array(bits)), sample.rest[:-1]), sample.rest)
        for bits in (8, 4, 2, 1)
    ]
    for finer, coarser in pairwise(found):
        assert finer.kl < coarser.kl
        assert finer.attention_error < coarser.attention_error
    assert found[0].kl < 1e-3


def test_every_arm_goes_on_with_every_text(engine, sample):
    arms = [Arm("int8"), Arm("static", 4.0), Arm("ours", 4.0, (8, 4, 2))]
    rows = go_on(engine, [sample, sample], arms)
    assert [row["arm"] for row in rows] == 2 * ["int8", "static", "ours 8/4/2"]
    assert rows[:3] == [row | {"text": 0} for row in rows[3:]]
    assert all(row["share"] < 0.29 for row in rows if row["mean"] == 4)


@pytest.mark.slow
def test_damage_is_by_layer_and_bits(engine, sample):
    damage = layer_damage(engine, [sample])
    assert damage.shape == (8, 9)
    assert (damage[:, 1] > damage[:, 7]).all()


def test_an_answer_counts_if_every_token_of_it_is_most_likely(engine):
    told = "User: That is all I need. Thank you!\nAssistant: You are welcome.\n" * 3
    likely = Question("User: Bye.\nAssistant: Have a great", " day.\n")
    unlikely = Question("User: Bye.\nAssistant: Have a great", " locker.\n")
    rows = ask(engine, [Recall(told, (likely, unlikely))], [Arm("static", 8.0)])
    assert [row["right"] for row in rows] == [0.5, 0.5]


@pytest.mark.slow
def test_a_figure_is_three_files(data, reference_model, tmp_path, capsys):
    out = tmp_path / "figures"
    main(["fig6b", "--data", str(data), "-n", "1", "-o", str(out)])
    printed = capsys.readouterr().out
    assert "| int8 | 8 | 51.8 % |" in printed
    assert (out / "tolerance-fig6b.md").read_text() == printed
    document = json.loads((out / "tolerance-fig6b.json").read_text())
    assert len(document["rows"]) == 4
    assert document["settings"]["model"] == f"{reference_model.stem}-as-f16.gguf"
    assert (out / "tolerance-fig6b.png").stat().st_size > 1000


@pytest.mark.slow
def test_the_default_model_is_the_packaged_one_without_its_rounding(reference_model, tmp_path):
    copy = f16_copy(reference_model, tmp_path)
    exact, found = (read_weights(GGUFReader(path)) for path in (reference_model, copy))
    assert exact.keys() == found.keys()
    for name, values in exact.items():
        assert np.allclose(values, found[name], rtol=1e-3, atol=1e-7)
    with Engine(copy, n_ctx=256) as engine:
        assert 3 <= len(engine.tokens("The end of it.")) <= 8


def test_recall_needs_a_model_that_was_taught(data, capsys):
    with pytest.raises(SystemExit):
        main(["recall", "--data", str(data)])
    assert "recall needs --model" in capsys.readouterr().err

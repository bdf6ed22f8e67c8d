"""Sparse decoding in torch, against the engine and against numpy with a mask."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGUFReader

from llmaas_eval.data import packaged_lines
from llmaas_eval.sparse.report import report
from llmaas_eval.sparse.study import SparseSettings, study
from llmaas_eval.sparse.texts import Texts
from llmaas_eval.tolerance.engine import Engine
from llmaas_eval.weights import read_weights

torch = pytest.importorskip("torch", reason="make test-train installs it")
oracles = pytest.importorskip("llmaas_eval.sparse.oracle")


@pytest.fixture(scope="module")
def rows(reference_model):
    """Return rows of the packaged conversations."""
    with Engine(reference_model, n_ctx=256) as engine:
        texts = [engine.tokens("\n".join(lines))[:96] for lines in packaged_lines()]
    return np.array([text for text in texts if len(text) == 96][:4], np.int64)


@pytest.fixture(scope="module")
def oracle(reference_model, rows):
    found = oracles.Oracle(reference_model)
    found.calibrate(rows)
    return found


@pytest.fixture
def masked(oracle):
    yield oracle.mask
    oracle.mask(0, "top-k")


def test_densely_it_computes_what_the_engine_computes(oracle, rows, reference_model):
    tokens = rows[0].tolist()
    with Engine(reference_model, n_ctx=256) as engine:
        log_p = engine.go_on(engine.prefill(tokens[:16]).blob, tokens[16:]).log_p
    expected = -log_p[np.arange(79), tokens[17:]]
    # the engine rounds activations
    assert oracle.nats(rows[0])[16:] == pytest.approx(expected, abs=0.25)
    assert oracle.nats(rows[0])[16:].mean() == pytest.approx(expected.mean(), rel=0.01)


@pytest.mark.parametrize("selection", oracles.SELECTIONS)
def test_matrices_see_the_active_channels_alone(oracle, rows, reference_model, masked, selection):
    masked(0.5, selection, 10)
    operands = oracle.read(rows[0])
    weights = read_weights(GGUFReader(reference_model))
    for layer in (0, 7):
        x = operands[layer, "ffn_up"].copy()
        if selection == "threshold":
            left_out = np.abs(x) < oracle.threshold((layer, "ffn_up"), 0.5)
        else:
            left_out = np.argsort(np.argsort(np.abs(x), axis=1), axis=1) < x.shape[1] // 2
        x[10:][left_out[10:]] = 0
        gate, up = (x @ weights[f"blk.{layer}.ffn_{name}.weight"].T for name in ("gate", "up"))
        expected = gate / (1 + np.exp(-gate)) * up
        assert np.abs(operands[layer, "ffn_down"] - expected).max() < 1e-4


def test_a_token_depends_on_no_later_one(oracle, rows, masked):
    masked(0.6, "top-k")
    assert oracle.nats(rows[0])[:39] == pytest.approx(oracle.nats(rows[0][:40]), abs=1e-4)


def test_a_prompt_that_is_all_changes_nothing(oracle, rows, masked):
    dense = oracle.nats(rows[0])
    masked(0.7, "threshold", 96)
    assert (oracle.nats(rows[0]) == dense).all()


def test_thresholds_leave_out_the_share_that_they_are_to(oracle, rows):
    for sparsity in (0.3, 0.5, 0.8):
        assert oracle.busy((3, "ffn_down"), sparsity).mean() == pytest.approx(
            1 - sparsity, abs=0.01
        )


@pytest.mark.parametrize("selection", oracles.SELECTIONS)
def test_perplexity_rises_with_sparsity(oracle, rows, selection):
    found = oracles.perplexities(oracle, rows, (0, 0.5, 0.8), selection)
    assert found[0] < found[0.5] < 1.3 * found[0] < found[0.8]


@pytest.mark.slow
def test_everything_in_tables(rows, reference_model):
    texts = Texts(rows[:1], rows, {"talks": rows[:2, :24]})
    found = study(reference_model, texts, SparseSettings((0.0, 0.5), 8, 1, (0.3,), (1, 4)))
    text = report(found)
    assert text.count("## ") == len(found) == 7
    assert "| top-k | 8 |" in text
    assert len(found["reads"]) == 2 * 4 * 4 * 2 * 2 * 2
    static = [row for row in found["hits"] if row["policy"] == "static"]
    assert all(0 < row["rate"] < 1 for row in static)

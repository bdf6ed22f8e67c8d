"""Contextual sparsity with an oracle's neurons, and the baseline that also shortens prompts."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from preparing import prepare
from tiny_encoders import write_general

from llmaas_eval.deadlines.loaded import answered, scoring
from llmaas_eval.deadlines.loaded.contextual import SparseNeurons, sparse_scores
from llmaas_eval.deadlines.loaded.probes import Case, Probe, Probes, Served
from llmaas_eval.deadlines.loaded.questions import packaged_questions
from llmaas_eval.deadlines.loaded.study import Plan
from llmaas_eval.elastic.engine import Variant

ITEMS = [
    scoring.Item([1, *range(40, 60)], [], [[70, 71, 72], [80], [90, 91]], 0),
    scoring.Item([1, *range(60, 70)], [30, 31], [[90], [91]], 1),  # with words before the choice
]


def test_an_oracle_with_all_neurons_is_the_whole_model(reference_model):
    whole = scoring.scores(Variant(reference_model), ITEMS, {(0, 0): [0, 1]})[0, 0]
    found = sparse_scores(SparseNeurons(reference_model, 1.0), ITEMS, [0, 1], "")
    assert found.choice.tolist() == whole.choice.tolist()
    assert found.nats == pytest.approx(whole.nats, rel=0.02)
    only = sparse_scores(SparseNeurons(reference_model, 1.0), ITEMS, [1], "")
    assert (only.choice[0], only.nats[1]) == (-1, pytest.approx(found.nats[1], rel=1e-4))


def test_only_the_tokens_of_an_answer_are_sparse_and_the_largest_neurons_stay(reference_model):
    prompt, head = [1, *range(40, 60)], [70, 71]
    whole, half, tenth = (
        SparseNeurons(reference_model, share).log_probabilities(prompt, [head])[0]
        for share in (1.0, 0.5, 0.1)
    )
    assert torch.allclose(whole[0], tenth[0], atol=1e-4)  # after the prompt
    _, again = SparseNeurons(reference_model, 0.1).log_probabilities(prompt, [[90, 91, 92], head])
    assert torch.allclose(again, tenth, atol=1e-4)  # texts do not see each other
    near, far = ((whole - one)[1:].abs().mean() for one in (half, tenth))
    assert 0 < near < far / 2


def test_a_token_keeps_its_share_of_the_neurons(reference_model):
    model = SparseNeurons(reference_model, 0.25)
    model.log_probabilities([1], [[40, 41]])  # a prompt of one token
    weights, n_ff = model.weights(0), model.blocks.n_ff
    x = torch.from_numpy(np.random.default_rng(0).standard_normal((3, n_ff)).astype(np.float32))
    found = model.product(0, weights, "ffn_down", x)
    effects = x.abs() * weights["ffn_down.weight"].norm(dim=0)
    least = effects.sort(dim=-1, descending=True).values[:, n_ff // 4 - 1, None]
    expected = torch.where(effects >= least, x, 0)
    expected[0] = x[0]
    assert torch.allclose(found, expected @ weights["ffn_down.weight"].T, atol=1e-4)


def test_answers_are_those_after_the_words_that_were_read(reference_model, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    write_general(tmp_path)
    monkeypatch.setattr(answered, "BASELINES", {})
    (tmp_path / "models").mkdir()
    prepare(reference_model, tmp_path / "models" / f"{reference_model.stem}.elastic.gguf")
    apps = packaged_questions()
    probes = Probes(SimpleNamespace(apps=apps), tmp_path / "probes", 12, 0)

    def probe(system, share):
        served = [
            Served(one.number, one.app, one.question, 1.0, 1.0, True, True, (1.0, 1.0), (), 0, None,
                   share)
            for one in probes.arrivals(0.0)
        ]  # fmt: skip
        return Probe(Case(system, "cold", 0.0), 1.0, served, None)

    done = [probe("ours", 1.0), probe("ours-shorter", 0.5), probe("fifo-one-level", 1.0)]
    plan = Plan(("answers",), (), (), (), (), 12, 0, 1, "tiny", ("packaged",), 0, None, None)
    rows = {row["by"]: row for row in answered.answered(plan, apps, probes, done, tmp_path)}
    assert [*rows] == ["ours", "ours-shorter", "fifo-one-level", "LG2+CS"]
    assert rows["ours"]["nats"] == rows["fifo-one-level"]["nats"] == [0.0] * 12
    assert all(rows["ours-shorter"]["nats"])
    is_whole = [one.app == "Rewind" for one in done[0].served]
    assert [nats == 0 for nats in rows["LG2+CS"]["nats"]] == is_whole

    monkeypatch.setattr(answered.Shorter, "items", None)  # nothing is asked again
    again = {row["by"]: row for row in answered.answered(plan, apps, probes, done, tmp_path)}
    assert again == rows
    (tmp_path / "home" / ".cache" / "llmaas" / "prompts" / "general.gguf").unlink()
    assert "LG2+CS" not in {
        row["by"] for row in answered.answered(plan, apps, probes, done[2:], tmp_path)
    }

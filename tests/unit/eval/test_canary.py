"""The canary: its report on differing builds, and its probe on the installed build."""

from __future__ import annotations

import zipfile

import pytest

from llmaas_eval.canary import __main__ as canary
from llmaas_eval.canary.compare import changes, problems

FACTS = {
    "versions": {"backend interface": 2, "ggml": "0.25.3"},
    "operations": ["NONE", "ADD", "MUL"],
    "types": ["f32", "f16"],
    "slots": {"backend": 17},
    "missing": [],
    "refusal": None,
    "vanilla": "a",
    "hooked": "a",
    "products": 8,
    "left registered": False,
}


def without(*names):
    return {name: fact for name, fact in FACTS.items() if name not in names}


def test_same_builds_differ_in_nothing():
    assert list(changes(FACTS, FACTS)) == []
    assert list(problems(FACTS, [])) == []


def test_each_difference_is_a_line():
    newest = FACTS | {
        "versions": {"backend interface": 3, "ggml": "0.25.3"},
        "operations": ["NONE", "NEW", "ADD"],
        "slots": {"backend": 18},
    }
    assert list(changes(FACTS, newest)) == [
        "versions: backend interface 2 -> 3",
        "slots: backend 17 -> 18",
        "operations: 1 new: NEW",
        "operations: 1 gone: MUL",
        "operations: 1 with another number: ADD",
    ]


@pytest.mark.parametrize(
    ("found", "problem"),
    [
        (FACTS | {"refusal": "it has no operation GLU"}, "the engine is refused: it has no"),
        (FACTS | {"hooked": "b"}, "a model's logits differ"),
        (FACTS | {"products": 0}, "computed no matrix product"),
        (FACTS | {"left registered": True}, "stays registered"),
        (FACTS | {"missing": ["ggml_scale"]}, "ggml_scale is missing"),
        (without("hooked", "left registered") | {"said": "exit -11, "}, "while it ran a model"),
        (without("refusal", "left registered"), "died before the engine could be asked"),
    ],
)
def test_what_would_not_work_is_said_once(found, problem):
    (said,) = problems(found, [])
    assert problem in said


def test_a_binding_that_is_gone_is_named():
    assert list(problems(FACTS, ["llama_decode"])) == ["llama_decode is missing"]


def test_the_installed_build_computes_a_model():
    libraries = [canary._folder_of("llama_cpp") / "lib" / name for name in canary._INSTALLED]
    facts = canary._probe(libraries)
    assert list(problems(facts, [])) == [], facts["said"]
    assert facts["versions"]["backend interface"] == 2
    assert {"MUL_MAT", "GLU"} <= set(facts["operations"])
    assert facts["types"][:2] == ["f32", "f16"]
    assert facts["slots"] == {"backend": 17, "buffer": 11, "device": 15}


@pytest.mark.slow
def test_without_network_it_says_so_and_stops_nobody(monkeypatch, capsys):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert canary.main([]) == 0
    said = capsys.readouterr().out
    assert said.startswith("canary: skipped: pip could not download xllamacpp: ")
    assert said.count("\n") == 1


@pytest.mark.parametrize("content", [None, {}])
def test_a_wheel_of_another_kind_is_skipped(tmp_path, capsys, content):
    wheel = tmp_path / "xllamacpp-1-any.whl"
    if content is None:
        wheel.write_bytes(b"no archive")
    else:
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("xllamacpp/__init__.py", "")
    assert canary.main(["--wheel", str(wheel)]) == 0
    assert capsys.readouterr().out.startswith("canary: skipped: ")

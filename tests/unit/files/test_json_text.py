"""JSON from files: values or ``ValueError``, parsed in one place only."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import llmaas_plugins
from llmaas_plugins.files.json_text import parse_json

OTHERS = {
    "files/json_text.py",
    "files/json_rows.py",  # reports the position of an error in a chat export
    "server/grammar_worker.py",  # between two processes of ours
    "server/upstream.py",  # a body that was parsed before
}


def test_values():
    assert parse_json('{"a": [1, 2.5, -1e3, null, true, "x"]}') == {
        "a": [1, 2.5, -1000.0, None, True, "x"]
    }
    assert parse_json(b"[]") == []


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"a":' * 100_000,
        "NaN",
        "[Infinity]",
        "-Infinity",
        "[1e400]",
        "",
        "{",
        b"\xff",
    ],
    ids=lambda text: str(text)[:8],
)
def test_anything_else_is_a_value_error(text):
    with pytest.raises(ValueError):
        parse_json(text)


@pytest.mark.slow
def test_nobody_else_parses_json():
    root = Path(llmaas_plugins.__file__).parent
    found = {
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and node.attr in {"load", "loads"}
        and isinstance(node.value, ast.Name)
        and node.value.id == "json"
    }
    assert found == OTHERS

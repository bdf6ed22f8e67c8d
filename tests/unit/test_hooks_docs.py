"""Each hook is tested, documented under its exact signature, and says what it must."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from llmaas_hooks import specs

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "hooks.md"
HEADING = re.compile(r"^### `(.+)`$", re.MULTILINE)


def spec_functions():
    tree = ast.parse(Path(specs.__file__).read_text())
    return [node for node in tree.body if isinstance(node, ast.FunctionDef)]


def signature(node):
    return f"{node.name}({ast.unparse(node.args)}) -> {ast.unparse(node.returns)}"


def test_names():
    names = [node.name for node in spec_functions()]
    assert sorted(names) == sorted(specs.__all__)


def test_every_hook_has_a_test():
    found = {
        node.name
        for path in (ROOT / "tests").rglob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
    }
    missing = [
        name
        for name in specs.__all__
        if not any(test.startswith(f"test_hook_{name}") for test in found)
    ]
    assert missing == []


def test_every_hook_is_documented_and_nothing_else():
    documented = HEADING.findall(PAGE.read_text())
    assert sorted(documented) == sorted(signature(node) for node in spec_functions())


@pytest.mark.parametrize("node", spec_functions(), ids=lambda node: node.name)
def test_what_a_section_says(node):
    _, _, section = PAGE.read_text().partition(f"### `{signature(node)}`\n")
    section = re.split(r"^##", section, maxsplit=1, flags=re.MULTILINE)[0]
    summary = ast.get_docstring(node).splitlines()[0]
    assert summary in section
    for word in ("When", "Thread", "Cost", "Returns", "Errors"):
        assert f"* **{word}:** " in section, word
    (example,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    assert f"def {node.name}(" in example


@pytest.mark.parametrize("node", spec_functions(), ids=lambda node: node.name)
def test_what_a_docstring_says(node):
    text = ast.get_docstring(node)
    for word in ("When:", "Thread:", "Errors:"):
        assert word in text, word
    assert ("Returns:" in text) == (ast.unparse(node.returns) != "None")

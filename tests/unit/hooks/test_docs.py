"""The hooks' documentation: each hook is tested, and documented under its exact signature."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from pathlib import Path

import pytest

from llmaas_hooks import levels, native, specs, types

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "reference" / "hooks.md"
TYPES = ROOT / "docs" / "reference" / "api" / "types.md"
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
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    missing = [name for name in specs.__all__ if f"def test_hook_{name}" not in tests]
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


LITERALS = {"Activation", "States"}


def fields(kind):
    """Return the names of the fields of a dataclass or named tuple; none for other types."""
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return [field.name for field in dataclasses.fields(kind)]
    return list(getattr(kind, "_fields", ()))


GIVEN = [
    getattr(module, name)
    for module, protocols in (
        (types, {"Engine"}),
        (levels, set()),
        (native, set(native.__all__) - LITERALS),
    )
    for name in module.__all__
    if name in protocols or fields(getattr(module, name))
]


@pytest.mark.parametrize("kind", GIVEN, ids=lambda kind: kind.__name__)
def test_every_type_that_hooks_are_given_is_on_the_page_of_types(kind):
    shown = re.findall(r"^::: (\S+)$", TYPES.read_text(), re.MULTILINE)
    assert any(f"{kind.__module__}.".startswith(f"{module}.") for module in shown)


@pytest.mark.parametrize("kind", GIVEN, ids=lambda kind: kind.__name__)
def test_what_a_type_says_where_it_is_defined(kind):
    if not fields(kind):
        assert all(found.__doc__ for name, found in vars(kind).items() if name[0] != "_")
        return
    _, _, attributes = inspect.getdoc(kind).partition("Attributes:\n")
    documented = re.findall(r"^    (\w+): \S", attributes, re.MULTILINE)
    assert documented == fields(kind)


def test_what_hooks_take_and_return_is_documented():
    named = {
        word
        for node in spec_functions()
        for word in re.findall(r"[A-Z]\w+", signature(node))
        if word in {*types.__all__, *levels.__all__, *native.__all__}
    }
    assert named - {"Tokens"} <= {kind.__name__ for kind in GIVEN}

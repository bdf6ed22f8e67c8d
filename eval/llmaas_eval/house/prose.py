"""Text in a source file that is written for people, by line.

This is text of docstrings, comments and strings in Python, comments in C, paragraphs in Markdown,
and comments in configuration files. Code is left out.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

__all__ = ["Passage", "passages"]

_C_COMMENT = re.compile(r"/\*+(.*?)\*/|//([^\n]*)", re.DOTALL)
_FENCE = re.compile(r"^(```|~~~).*?^\1[^\n]*$", re.DOTALL | re.MULTILINE)
_LINE_START = re.compile(r"^[ \t]*(\*(?!\*)|#+(?!\[)|[-*+>] |\d+\. |\|)?[ \t]*", re.MULTILINE)
_HASH = re.compile(r"(?:^|\s)#+ ([^\n]*)")


class Passage(NamedTuple):
    """A paragraph, list item, table row or comment.

    Attributes:
        line: Line of the file where the text begins, from 1.
        text: The text without comment or list marks.
    """

    line: int
    text: str


def passages(path: Path) -> Iterator[Passage]:
    """Yield the passages of a file; none for an unknown kind of file."""
    find = _FINDERS.get(path.suffix)
    if find is None:
        find = _hashes if path.name == "Makefile" else None
    if find is not None:
        yield from find(path.read_text(encoding="utf-8"))


def _python(source: str) -> Iterator[Passage]:
    for line, text in _strings(ast.parse(source)):
        if " " in text:
            yield from _paragraphs(text, line)
    yield from _comments(source)


def _strings(node: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and text of each string; an f-string has "…" for each value."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.lineno, node.value
    elif isinstance(node, ast.JoinedStr):
        parts = (part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
        yield node.lineno, "".join(map(str, parts))
    else:
        for child in ast.iter_child_nodes(node):
            yield from _strings(child)


def _comments(source: str) -> Iterator[Passage]:
    """Yield comments; consecutive lines with only a comment are one passage."""
    comment: list[str] = []
    first = next_row = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        row, is_alone = token.start[0], not token.line[: token.start[1]].strip()
        if comment and not (is_alone and row == next_row):
            yield Passage(first, " ".join(comment))
            comment = []
        first = first if comment else row
        comment.append(token.string.lstrip("#: "))
        next_row = row + 1 if is_alone else 0
    if comment:
        yield Passage(first, " ".join(comment))


def _c(source: str) -> Iterator[Passage]:
    for match in _C_COMMENT.finditer(source):
        text = re.sub(r"(?m)^[ \t]*\*(?!\*)", "", match[1] or match[2] or "")
        yield from _paragraphs(text, source.count("\n", 0, match.start()) + 1)


def _markdown(source: str) -> Iterator[Passage]:
    yield from _paragraphs(_FENCE.sub(lambda fence: "\n" * fence[0].count("\n"), source), 1)


def _hashes(source: str) -> Iterator[Passage]:
    for number, line in enumerate(source.splitlines(), 1):
        if match := _HASH.search(line):
            yield Passage(number, match[1])


def _paragraphs(text: str, line: int) -> Iterator[Passage]:
    """Yield each paragraph, list item and table row."""
    at = line
    for part in re.split(r"(\n[ \t]*\*?[ \t]*\n|\n(?=[ \t]*(?:[-*+] |\d+\. |\||#+ )))", text):
        words = _LINE_START.sub("", part).strip(" *|\n")
        if words:
            yield Passage(at + len(part) - len(part.lstrip("\n")), words)
        at += part.count("\n")


_FINDERS = {
    ".py": _python,
    ".c": _c,
    ".h": _c,
    ".md": _markdown,
    ".toml": _hashes,
    ".yml": _hashes,
    ".sh": _hashes,
    ".txt": _hashes,
}

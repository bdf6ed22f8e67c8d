"""Source files that the documentation links to, as pages of the site.

MkDocs loads this file as a hook. Pages link to files outside ``docs/`` by relative paths, as in
``../../native/FORMAT.md``. A fragment names a symbol, as in ``../../eval/run.py#Run.start``. On the
site each such file is a page of its own, with an anchor at each symbol that a page links to.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

__all__ = ["Link", "links_in", "on_files", "on_page_markdown", "symbol_line"]

_FENCE = re.compile(r"^(```+).*?^\1\s*$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"(?<=\]\()(?![a-z]+:|/|#)([^)#\s]+)(?:#([^)\s]*))?(?=\))")
_MARK = re.compile(r"^(```\w+) (?:file=(\S+)|no-run)$", re.MULTILINE)
_README, _INDEX = "README.md", "docs/index.md"
_LANGUAGES = {".py": "python", ".c": "c", ".h": "c", ".toml": "toml"}


class Link(NamedTuple):
    """A relative link in a page.

    Attributes:
        path: Its target, relative to the root of the repository.
        fragment: Name of a heading or symbol in the target, or an empty string.
    """

    path: str
    fragment: str


def links_in(markdown: str, page: str) -> Iterator[Link]:
    """Yield the relative links in a page, which lies at ``page`` in the repository."""
    for match in _LINK.finditer(_FENCE.sub("", markdown)):
        yield _link(match, page)


def symbol_line(source: str, name: str, symbol: str) -> int | None:
    """Return the line, from 1, where a symbol's definition begins, or None if it is not there.

    Args:
        source: Text of the file.
        name: Name of the file; its suffix tells Python from C.
        symbol: Name of a function, class, constant or, as in ``Run.start``, of a method.
    """
    return _python_line(source, symbol) if name.endswith(".py") else _c_line(source, symbol)


def on_files(files: Any, config: Any) -> Any:
    """Add a page for each file outside ``docs/`` that a page links to."""
    from mkdocs.structure.files import File, InclusionLevel

    symbols: dict[str, set[str]] = {}
    for file in files.documentation_pages():
        for link in links_in(file.content_string, f"docs/{file.src_uri}"):
            if not _is_of_the_site(link.path):
                symbols.setdefault(link.path, set()).add(link.fragment)
    symbols.pop(_README, None)
    root = Path(config.config_file_path).parent
    for path, wanted in sorted(symbols.items()):
        if (root / path).is_file():  # MkDocs reports a link to any other path as broken
            content = _page(path, (root / path).read_text(encoding="utf-8"), wanted - {""})
            level = InclusionLevel.NOT_IN_NAV
            uri = _page_of(path).removeprefix("docs/")
            files.append(File.generated(config, uri, content=content, inclusion=level))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links to files outside ``docs/`` to the pages of these files; title code blocks."""
    here = f"docs/{page.file.src_uri}"

    def on_the_site(match: re.Match[str]) -> str:
        link = _link(match, here)
        if _is_of_the_site(link.path):
            return match[0]
        target = os.path.relpath(_page_of(link.path), PurePosixPath(here).parent)
        return f"{target}#{link.fragment}" if link.fragment else target

    if here.startswith("docs/source/"):
        return markdown
    return _MARK.sub(_titled, _LINK.sub(on_the_site, markdown))


def _titled(mark: re.Match[str]) -> str:
    """Return the first line of a fenced block, whose marks for tests MkDocs does not know."""
    return f'{mark[1]} title="{mark[2]}"' if mark[2] else mark[1]


def _is_of_the_site(path: str) -> bool:
    is_code = path.startswith("docs/examples/") and not path.endswith(f"/{_README}")
    return path.startswith("docs/") and not is_code


def _link(match: re.Match[str], page: str) -> Link:
    path = os.path.normpath(PurePosixPath(page).parent / match[1])
    return Link(path, match[2] or "")


def _page_of(path: str) -> str:
    return _INDEX if path == _README else f"docs/source/{path.removesuffix('.md')}.md"


def _page(path: str, source: str, symbols: set[str]) -> str:
    """Return the page of a file: its text, cut where a symbol begins."""
    head = "---\nsearch: {exclude: true}\n---\n\n"
    if path.endswith(".md"):
        return head + source
    lines = source.splitlines()
    starts = {symbol_line(source, path, symbol): symbol for symbol in symbols}
    cuts = sorted(line for line in starts if line is not None)
    parts = [head, f"# {PurePosixPath(path).name}\n\n`{path}`\n\n"]
    for start, end in zip([1, *cuts], [*cuts, len(lines) + 1], strict=True):
        code = "\n".join(lines[start - 1 : end - 1])
        if start in starts:
            parts.append(f'<a id="{starts[start]}"></a>\n\n')
        if code.strip():
            language = _LANGUAGES.get(PurePosixPath(path).suffix, "text")
            parts.append(f'````{language} linenums="{start}"\n{code}\n````\n\n')
    return "".join(parts)


def _python_line(source: str, symbol: str) -> int | None:
    body: list[ast.stmt] = ast.parse(source).body
    found: ast.stmt | None = None
    for name in symbol.split("."):
        found = next((node for node in body if name in _names(node)), None)
        body = found.body if isinstance(found, ast.ClassDef) else []
    if found is None:
        return None
    decorators = getattr(found, "decorator_list", [])
    return min(node.lineno for node in (found, *decorators))


def _names(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _c_line(source: str, symbol: str) -> int | None:
    """Return the line of a definition, or of the comment right above it."""
    function, struct = rf"[^;\n#]*\b{symbol}\([^;]*?\{{", rf"(?:typedef )?struct {symbol} \{{"
    pattern = rf"^(?!\s)(?:{function}|{struct}|#define {symbol}\b)"
    match = re.search(pattern, source, re.MULTILINE)
    if match is None:
        return None
    before = source[: match.start()].splitlines()
    line = len(before)
    while line and re.match(r"\s*(/?\*|.*\*/$)", before[line - 1]):
        line -= 1
    return line + 1

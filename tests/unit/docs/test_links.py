"""Links of all pages: each target exists, and so does each symbol that a link names."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from llmaas_eval.house.source_pages import links_in, on_page_markdown, symbol_line

ROOT = Path(__file__).parents[3]
FILES = subprocess.run(
    ["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True
).stdout.splitlines()
PAGES = [name for name in FILES if name.endswith(".md")]
PAPERS = ("kv_chunks", "flash_weights", "elastic", "knn_lm")
CODE = (".py", ".c", ".h")

PYTHON = """
LIMIT: int = 3
OTHER = 4

@decorated
class Run:
    def start(self):
        start = 1
"""
C = """#define LIMIT 3

static int run(int n);

/* Run once.
 * Twice is an error. */
static int run(
    int n) {
    return other(n);
}
struct state {
    int n;
};
"""


def links_of(page):
    return list(links_in((ROOT / page).read_text(encoding="utf-8"), page))


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_to_a_file(page):
    assert [link.path for link in links_of(page) if not (ROOT / link.path).exists()] == []


@pytest.mark.parametrize("page", PAGES)
def test_every_symbol_that_a_link_names_is_in_the_file(page):
    for link in links_of(page):
        if not link.fragment or not link.path.endswith(CODE):
            continue
        source = (ROOT / link.path).read_text(encoding="utf-8")
        assert symbol_line(source, link.path, link.fragment) is not None, link


@pytest.mark.parametrize("paper", PAPERS)
def test_a_papers_core_is_at_most_three_clicks_from_the_readme(paper):
    near = {"README.md"}
    for _ in range(2):
        near |= {link.path for page in near if page in PAGES for link in links_of(page)}
    page = f"docs/explanation/{paper}.md"
    assert page in near
    named = {link for link in links_of(page) if link.fragment and link.path.endswith(CODE)}
    assert len(named) >= 7


@pytest.mark.parametrize(
    ("page", "column"), [("internals", "module"), ("engine", "file in native/")]
)
def test_the_maps_name_only_modules_that_exist(page, column):
    text = (ROOT / "docs" / "explanation" / f"{page}.md").read_text(encoding="utf-8")
    tables = re.findall(rf"^\| {column} \|.*\n\|---.*\n((?:\|.*\n)+)", text, re.MULTILINE)
    rows = [row.split("|")[1] for table in tables for row in table.splitlines()]
    named = {name for row in rows for name in re.findall(r"(?:`|\*\*)([\w/]+?)/?(?:`|\*\*)", row)}
    places = {f"/{name.rsplit('.', 1)[0]}/" for name in FILES}
    assert len(named) > 40
    assert [name for name in named if not any(f"/{name}/" in place for place in places)] == []


@pytest.mark.parametrize("page", [page for page in PAGES if page.startswith("docs/")])
def test_paths_that_a_page_names_exist(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    paths = re.findall(r"`((?:eval|hooks|llmaas_plugins|native|patches|tests)/[\w./-]+)[`:]", text)
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_links_in_code_blocks_to_the_web_and_within_a_page_are_none():
    page = "[a](../x.md#y) [b](https://x.y/z) [c](#here)\n```\n[d](e.md)\n```\n"
    assert list(links_in(page, "docs/how-to/page.md")) == [("docs/x.md", "y")]


@pytest.mark.parametrize(
    ("symbol", "line"),
    [("LIMIT", 2), ("OTHER", 3), ("Run", 5), ("Run.start", 7), ("start", None), ("Run.end", None)],
)
def test_symbols_of_python(symbol, line):
    assert symbol_line(PYTHON, "a.py", symbol) == line


@pytest.mark.parametrize(
    ("symbol", "line"), [("LIMIT", 1), ("run", 5), ("state", 11), ("other", None), ("n", None)]
)
def test_symbols_of_c(symbol, line):
    assert symbol_line(C, "a.c", symbol) == line


@pytest.mark.parametrize(
    ("written", "on_the_site"),
    [
        ("[a](../../native/x.c#run)", "[a](../source/native/x.c.md#run)"),
        ("[a](../../native/FORMAT.md)", "[a](../source/native/FORMAT.md)"),
        ("[a](../../README.md)", "[a](../index.md)"),
        ("[a](../examples/b/src/c.py)", "[a](../source/docs/examples/b/src/c.py.md)"),
        ("[a](../examples/b/README.md)", "[a](../examples/b/README.md)"),
        ("[a](engine.md#taps)", "[a](engine.md#taps)"),
        ("```python file=a.py\n```", '```python title="a.py"\n```'),
        ("```python no-run\n```", "```python\n```"),
    ],
)
def test_pages_on_the_site_link_to_pages_of_source_files(written, on_the_site):
    page = SimpleNamespace(file=SimpleNamespace(src_uri="explanation/page.md"))
    assert on_page_markdown(written, page) == on_the_site

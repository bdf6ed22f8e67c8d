"""docs/explanation/engine.md: its statements are true, and its example plugin works."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

import pytest
from commands import run_python

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "explanation" / "engine.md"
TEXT = PAGE.read_text()
EXAMPLE = ROOT / "docs" / "examples" / "llmaas-sparsity"
BACKEND = ROOT / "native" / "backend"
SOURCES = "\n".join(
    path.read_text()
    for folder in ("native", "patches", "hooks")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in {".c", ".h", ".py"}
)


def test_every_file_of_the_backend_is_on_the_map():
    names = {path.name for path in BACKEND.iterdir() if path.suffix in {".c", ".h"}}
    missing = sorted(name for name in names if name.partition(".")[0] not in TEXT)
    assert missing == []


def test_what_the_page_names_exists():
    functions = set(re.findall(r"`(?:struct )?(llmaas_[a-z_]+)(?:\(\))?`", TEXT))
    assert len(functions) > 12
    assert sorted(name for name in functions if not re.search(rf"\b{name}\b", SOURCES)) == []


def test_where_the_page_points_to_exists():
    links = re.findall(r"\]\(([^)#:]+)\)", TEXT)
    paths = re.findall(r"`((?:native|tests|hooks|patches|docs)/[\w./-]+)`", TEXT)
    missing = [link for link in links if not (PAGE.parent / link).exists()]
    missing += [path for path in paths if not (ROOT / path).exists()]
    assert missing == []


def run(*command, **environ):
    return run_python(sys.executable, *command, environ=environ)


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    """Copy the example, install it into a folder beside the copy and return its path."""
    if not any(map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang"))):
        pytest.skip("no C compiler: the example's tap is compiled when it is installed")
    folder = tmp_path_factory.mktemp("sparsity")
    copy = shutil.copytree(EXAMPLE, folder / "source", ignore=shutil.ignore_patterns(".*_cache"))
    site = folder / "site"
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check")
    run("-m", "pip", "install", "-q", *options, "--target", site, copy)
    return copy, site


@pytest.mark.slow
def test_the_example_counts_what_numpy_counts(example, reference_model):
    copy, site = example
    options = ("-q", "-p", "no:cacheprovider", "--rootdir", copy, "-c", copy / "pyproject.toml")
    alone = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(site)}
    said = run("-m", "pytest", *options, copy / "tests", **alone)
    assert " passed" in said
    assert "skipped" not in said


@pytest.mark.slow
def test_the_example_ships_no_sources_of_its_tap(example):
    _, site = example
    names = [path.name for path in (site / "llmaas_sparsity").iterdir()]
    assert [name for name in names if name.endswith((".c", ".h"))] == []
    assert [name for name in names if name.endswith(".so")] == ["_tap.abi3.so"]


def test_the_example_is_short():
    files = ("tap.c", "tap.cdef.h", "plugin.py")
    text = "".join((EXAMPLE / "src" / "llmaas_sparsity" / name).read_text() for name in files)
    assert len([line for line in text.splitlines() if line.strip()]) < 120

"""The supported releases of llama-cpp-python: defined once in code, and the same everywhere."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import llama_cpp
import pytest

from llmaas_hooks import HookManager, IncompatibleError
from llmaas_patches import compat, install
from llmaas_patches.patcher import Applied, Patch, check
from llmaas_patches.table import PATCHES

ROOT = Path(__file__).parents[3]


def test_metadata_asks_for_the_range_that_was_tried():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    asked = [
        *project["project"]["dependencies"],
        project["project"]["optional-dependencies"]["server"][0],
    ]
    of_engine = [one for one in asked if one.startswith("llama-cpp-python")]
    assert of_engine == [
        f"llama-cpp-python{compat.VERSION_RANGE}",
        f"llama-cpp-python[server]{compat.VERSION_RANGE}",
    ]


def test_builds_are_made_with_the_newest():
    pinned = f"=={compat.NEWEST_VERSION}"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert f"llama-cpp-python{pinned}" in project["build-system"]["requires"]
    requirements = (ROOT / "requirements-dev.txt").read_text()
    assert re.search(rf"^llama-cpp-python\[server\]{pinned} ", requirements, re.MULTILINE)


def test_range_is_that_of_the_tested_releases(monkeypatch):
    def is_admitted(patch):
        monkeypatch.setattr(llama_cpp, "__version__", f"0.3.{patch}")
        try:
            compat.check_version()
        except IncompatibleError:
            return False
        return True

    admitted = tuple(f"0.3.{patch}" for patch in range(100) if is_admitted(patch))
    assert admitted == compat.TESTED_VERSIONS


@pytest.mark.parametrize(
    ("installed", "is_since"), [("0.3.35", False), ("0.3.36", True), ("0.3.100", True)]
)
def test_since(monkeypatch, installed, is_since):
    monkeypatch.setattr(llama_cpp, "__version__", installed)
    assert compat.is_since("0.3.36") == is_since


def missing(since):
    return Patch("llama_cpp.llama_cpp:llama_made_up", (), lambda _host, call: call, since=since)


def test_a_name_of_a_later_release_is_left_out():
    later = missing("0.3.99")
    assert check([later]) == []
    applied = Applied()
    applied.apply([later], None)
    applied.revert()


def test_a_name_that_the_release_should_have_is_drift():
    with pytest.raises(IncompatibleError, match="llama_made_up is missing"):
        Applied().apply([missing("0.3.30")], None)


def test_only_names_of_later_releases_are_left_out_here():
    missing = {p.target for p in PATCHES} - {target for target, _ in check(PATCHES)}
    oldest = compat.TESTED_VERSIONS[0] == llama_cpp.__version__
    assert missing == ({"llama_cpp.llama_cpp:llama_process"} if oldest else set())


def test_every_patch_fits_the_installed_release():
    assert [found for found in check(PATCHES) if found[1]] == []
    install(HookManager()).revert()

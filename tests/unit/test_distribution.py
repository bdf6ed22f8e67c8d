"""The source distribution and the packages that `pip install` takes from it."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("llmaas_plugins", "hooks/llmaas_hooks", "patches/llmaas_patches")
COMPILED = {".so", ".pyc"}


@pytest.mark.slow
def test_every_file_of_the_packages_is_distributed(tmp_path):
    build = "import sys; from scikit_build_core.build import build_sdist; build_sdist(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, tmp_path], cwd=ROOT, check=True, timeout=120)
    [path] = tmp_path.iterdir()
    with tarfile.open(path) as archive:
        distributed = {name.partition("/")[2] for name in archive.getnames()}
    files = {
        str(Path(folder, name).relative_to(ROOT))
        for package in PACKAGES
        for folder, _, names in os.walk(ROOT / package)
        for name in names
        if Path(name).suffix not in COMPILED
    }
    assert len(files) > 300
    assert files <= distributed, sorted(files - distributed)

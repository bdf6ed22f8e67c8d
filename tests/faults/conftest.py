"""The preloaded library that makes file operations fail, and processes that run under it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SOURCE = HERE.parents[1] / "native/tests/faults.c"
FLAGS = ["-std=c11", "-D_GNU_SOURCE", "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror"]


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    """Compile ``faults.c`` and return the library."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or sys.platform != "linux":
        pytest.skip("needs Linux and a C compiler: install gcc or clang")
    out = tmp_path_factory.mktemp("faults") / "libfaults.so"
    command = [compiler, *FLAGS, "-fvisibility=hidden", SOURCE, "-o", out, "-ldl", "-lpthread"]
    subprocess.run(command, check=True)
    return out


@pytest.fixture
def run_preloaded(library):
    """Return a function that runs a script of this folder under the library and parses its JSON."""

    def run(script, *args):
        path = os.pathsep.join([str(HERE.parent / "support"), os.environ.get("PYTHONPATH", "")])
        environ = os.environ | {"LD_PRELOAD": str(library), "PYTHONPATH": path}
        command = [sys.executable, HERE / script, library, *map(str, args)]
        found = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
        assert found.returncode == 0, found.stderr[-2000:]
        return json.loads(found.stdout)

    return run

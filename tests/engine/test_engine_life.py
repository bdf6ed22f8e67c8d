"""Random operations on models, contexts, levels and taps, under AddressSanitizer.

The program is ``native/tests/engine_life.c`` and its parts. It compares results with those of
vanilla contexts, checks the counters and the registration, and stops at the first difference.
ggml and llama.cpp are the installed libraries, without instrumentation.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from families import write_family
from gguf import GGMLQuantizationType
from soak import scale

from llmaas_eval.families import write_lora

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "sanitize"  # build folder of native/tests/run.sh
OPTIONS = ["-DCMAKE_BUILD_TYPE=Debug", "-DLLMAAS_TESTS=ON", "-DLLMAAS_SANITIZE=ON"]


def run(*command, **options):
    found = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert found.returncode == 0, (found.stdout + found.stderr)[-4000:]
    return found.stdout


@pytest.fixture(scope="module")
def program():
    """Compile ``engine_life`` and return it."""
    cmake = shutil.which("cmake", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if cmake is None:
        pytest.skip("needs cmake: pip install cmake")
    run(cmake, "-S", ROOT, "-B", BUILD, *OPTIONS, f"-DPython_EXECUTABLE={sys.executable}")
    run(cmake, "--build", BUILD, "--target", "engine_life", "-j2")
    return BUILD / "native" / "tests" / "engine_life"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Return an adapter and models: weights that are repacked, experts, and plain F16."""
    folder = tmp_path_factory.mktemp("models")
    return [
        write_lora("llama", folder / "lora.gguf"),
        write_family("llama", folder / "llama.gguf", weights=GGMLQuantizationType.Q4_0),
        write_family("llama-moe", folder / "moe.gguf"),
        write_family("phi3", folder / "phi3.gguf", weights=GGMLQuantizationType.F16),
    ]


@pytest.mark.slow
@pytest.mark.soak
def test_any_order_of_operations_leaves_nothing_wrong(program, files):
    seed = scale(1, random.SystemRandom().randrange(2**32))
    # otherwise OpenMP's threads spin while they wait, and contexts with several threads have many
    environ = os.environ | {"OMP_WAIT_POLICY": "passive"}
    done = run(program, str(seed), str(scale(500, 10_000)), *files, env=environ)
    counts = dict(part.split() for part in done.strip().split(", "))
    never = {name for name, n in counts.items() if n == "0"}
    assert never <= {"refused"}  # claims that this processor's weight layouts cannot meet

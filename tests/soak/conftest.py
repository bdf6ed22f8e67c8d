import shutil
import subprocess
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    out = tmp_path_factory.mktemp("faults") / "libfaults.so"
    flags = "-std=c11 -D_GNU_SOURCE -shared -fPIC -O1 -fvisibility=hidden".split()
    subprocess.run(
        [
            "cc",
            *flags,
            Path(__file__).parents[2] / "native/tests/faults.c",
            "-o",
            out,
            "-ldl",
            "-lpthread",
        ],
        check=True,
    )
    return out

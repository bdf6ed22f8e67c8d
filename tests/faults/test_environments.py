"""Environments that refuse common facilities: the suite may be slower but must be right."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType
from soak import SOAKING

from llmaas_eval.models import Shape, write_random_model

HERE = Path(__file__).parent
SHAPE = Shape(n_layer=6, n_embd=512, n_head=8, n_head_kv=4, n_ff=6144, n_ctx=512)
ALL = "proc,memlock,files,processors,io_uring,holes,mincore,direct"
ONE_BY_ONE = [*ALL.split(","), ""] if SOAKING else []

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="confines itself by Linux's means"),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="knows numbers of x86-64's calls"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Return a model with 75 MB of weights."""
    path = tmp_path_factory.mktemp("confined") / "model.gguf"
    return write_random_model(path, SHAPE, GGMLQuantizationType.Q8_0)


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("refused", [ALL, ALL.removeprefix("proc,"), *ONE_BY_ONE])
def test_an_app_gets_what_it_gets_anywhere(model, tmp_path, refused):
    path = os.pathsep.join([str(HERE.parent / "support"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, HERE / "confined.py", model, tmp_path / "kv", refused],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout.splitlines()[-1])
    if "skipped" in said:
        pytest.skip(f"this process may not confine another so: {said['skipped']}")
    assert said["streamed"]["same"]
    (streamed,) = said["streamed"]["models"]
    assert streamed["read_bytes"] > 0
    # without /proc, memory is known less exactly and all weights may be kept
    if "proc" not in refused.split(","):
        assert streamed["kept_bytes"] < streamed["bytes"] < streamed["read_bytes"]
    assert said["streamed"]["rate"] > 0
    assert said["restored"]["same"]
    assert said["restored"]["restored"][1] > 0
    assert said["erased"]
    assert [line for line in said["lines"] if "is streamed from its own file" not in line] == []
    assert 1 << 28 < said["available"] <= said["total"]
    if "processors" in refused:
        assert said["processors"] == 1

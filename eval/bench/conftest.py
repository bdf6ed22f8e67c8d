"""Models, engines and the summary of the benchmarks.

Big files are made once, in ``build/bench`` or in the folder that ``LLMAAS_BENCH_DIR`` names.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import tempfile
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType

from llmaas_eval.benchmarks import (
    deadlines,
    elastic,
    engine,
    flash_weights,
    knn_lm,
    kv_chunks,
    service,
)
from llmaas_eval.elastic.prepared import write_uniform
from llmaas_eval.models import (
    SHAPE_1B,
    SHAPE_200M,
    SHAPE_MOE,
    SHAPE_TINY,
    write_random_model,
)
from llmaas_eval.results import about
from llmaas_eval.stored import StoredContext
from llmaas_eval.tables import as_markdown
from llmaas_plugins.elastic.units import Calibration, Scores, blocks_of
from llmaas_plugins.model.quantize import quantize

ROOT = Path(__file__).parents[2]
N_TOKENS = 2048
F16 = GGMLQuantizationType.F16


@pytest.fixture(scope="session")
def bench_dir() -> Path:
    folder = Path(os.environ.get("LLMAAS_BENCH_DIR", ROOT / "build" / "bench"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def model_1b(bench_dir):
    path = bench_dir / "random-1b-q4_0.gguf"
    return path if path.exists() else write_random_model(path, SHAPE_1B)


@pytest.fixture(scope="session")
def model_1b_elastic(model_1b):
    """Prepare the model with the paper's widths and random scores.

    With random weights, one order of the units is as good as another.
    """
    path = model_1b.with_stem(f"{model_1b.stem}-elastic")
    blocks, rng = blocks_of(model_1b), np.random.default_rng(0)
    scores = Scores(
        rng.random((blocks.n_layers, blocks.n_groups)),
        rng.random((blocks.n_layers, blocks.n_ff)),
        Calibration("", 0, 0, "random"),
    )
    return path if path.exists() else write_uniform(model_1b, path, scores)


@pytest.fixture(scope="session")
def model_1b_local(bench_dir):
    """Write a model whose channels differ in activity like the reference model's channels.

    ``python -m llmaas_eval.sparse`` measures how much these differ.
    """
    path = bench_dir / "random-1b-local-q4_0.gguf"
    spread = {"attn_qkv": 0.27, "attn_output": 0.62, "ffn_up": 0.18, "ffn_down": 0.35}
    return path if path.exists() else write_random_model(path, SHAPE_1B, spread=spread)


@pytest.fixture(scope="session")
def model_1b_q4_k(bench_dir):
    path = bench_dir / "random-1b-q4_k.gguf"
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=bench_dir) as folder:
            source = write_random_model(Path(folder) / "f16.gguf", SHAPE_1B, F16)
            quantize(source, path, "Q4_K")
    return path


@pytest.fixture(scope="session")
def model_moe(bench_dir):
    path = bench_dir / "random-moe-q4_0.gguf"
    return path if path.exists() else write_random_model(path, SHAPE_MOE)


@pytest.fixture(scope="session")
def model_200m(bench_dir):
    path = bench_dir / "random-200m-q4_0.gguf"
    return path if path.exists() else write_random_model(path, SHAPE_200M)


@pytest.fixture(scope="session")
def model_tiny(bench_dir):
    path = bench_dir / "random-tiny-q4_0.gguf"
    return path if path.exists() else write_random_model(path, SHAPE_TINY)


@pytest.fixture(scope="session")
def blob_1b(model_1b):
    """Evaluate 2,048 tokens with flash attention; return the sequence state: 68 MB of F16 KV."""
    from llama_cpp import Llama, llama_cpp

    with contextlib.closing(make_llama(Llama, model_1b)) as llama:
        llama.eval(prompt_1b())
        n_bytes = llama_cpp.llama_state_seq_get_size(llama.ctx, 0)
        blob = np.empty(n_bytes, dtype=np.uint8)
        pointer = ctypes.cast(blob.ctypes.data, ctypes.POINTER(ctypes.c_uint8))
        assert llama_cpp.llama_state_seq_get_data(llama.ctx, pointer, n_bytes, 0) == n_bytes
        return blob


@pytest.fixture(params=["tolerance", "int8", "lossless"])
def stored(request, model_1b, blob_1b, bench_dir):
    """Open one context stored by ``kv_chunks`` and by vanilla, and engines to load it into."""
    with (
        tempfile.TemporaryDirectory(dir=bench_dir) as folder,
        StoredContext(model_1b, blob_1b, prompt_1b(), request.param, Path(folder)) as stored,
    ):
        yield stored


def make_llama(kind, path):
    return kind(str(path), n_ctx=N_TOKENS + 256, flash_attn=True, verbose=False)


def prompt_1b():
    return np.random.default_rng(0).integers(300, 1000, N_TOKENS).astype(np.int32)


def pytest_benchmark_update_json(output_json):
    """Add the record of this run to pytest-benchmark's JSON."""
    output_json.update(record())


def pytest_terminal_summary(terminalreporter, config):
    """Print each benchmark's ``extra_info``, and the tables of ``eval/results`` that it has."""
    session = getattr(config, "_benchmarksession", None)
    if session is None or not session.benchmarks:
        return
    terminalreporter.section("figures")
    for bench in session.benchmarks:
        figures = ", ".join(
            f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
            for key, value in bench.extra_info.items()
        )
        terminalreporter.line(f"{bench.name}: {figures}")
    document = record() | {"benchmarks": [bench.as_dict() for bench in session.benchmarks]}
    terminalreporter.section("tables")
    for module in (deadlines, elastic, engine, flash_weights, knn_lm, kv_chunks, service):
        if tables := as_markdown(module.TABLES, [document]):
            terminalreporter.write(f"{tables}\n\n")


def record():
    """Return the record of this run, which says so if it only checked the benchmarks.

    ``LLMAAS_BENCH_COMMAND`` replaces the command, for example by that of ``make``.
    """
    found = about()
    found["command"] = os.environ.get("LLMAAS_BENCH_COMMAND", found["command"])
    if os.environ.get("LLMAAS_BENCH_QUICK"):
        found["command"] = f"LLMAAS_BENCH_QUICK=1 {found['command']}"
    return found

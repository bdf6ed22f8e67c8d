"""Pytest plugin that replaces downloads and records what each test gets from the engine.

The same plugin runs in every mode; from the suite it uses only the status at the end.
"""

from __future__ import annotations

import functools
import hashlib
import json
import multiprocessing
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import llama_cpp
import numpy as np
import pytest
from llama_cpp import Llama

from llmaas_eval.peer_tests.models import DOWNLOADS, KINDS, SPLIT
from llmaas_patches.internals import sampler_type
from llmaas_plugins import active_suite

_MODEL = "llama_cpp_model_path"
"""The tests' fixture for a model of any kind; here it is run with each kind."""
_WORDS_ONLY = ("test_real_model",)
"""Tests that decode their prompt in one batch of 16, so the prompt must not get longer."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options for the folder of models and the file for results."""
    parser.addoption("--peer-models", type=Path, required=True)
    parser.addoption("--peer-record", type=Path, required=True)


def pytest_configure(config: pytest.Config) -> None:
    """Register the recorder before test modules import the functions that it wraps."""
    models, path = config.getoption("--peer-models"), config.getoption("--peer-record")
    config.pluginmanager.register(Recorder(models, path))


class Recorder:
    """Plugin that writes a JSON line at each test's start and end, and the suite's last status."""

    def __init__(self, models: Path, path: Path) -> None:
        """Replace downloads and wrap the calls whose results are recorded."""
        self._models = models
        self._path = path
        self._results: list[str] = []
        # One thread is enough for tiny models; other processes may need the cores.
        vars(multiprocessing)["cpu_count"] = lambda: 1
        vars(huggingface_hub)["hf_hub_download"] = self._model_of
        _wrap(Llama, "__init__", self._one_by_one)
        _wrap(sampler_type(), "sample", self._sampled)
        _wrap(Llama, "create_completion", self._completed)
        _wrap(Llama, "embed", self._embedded)
        _wrap(Llama, "save_state", self._saved)

    # -- pytest's hooks -------------------------------------------------------------------------

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Run tests of any model with each kind, with short and with longer prompts."""
        if _MODEL in metafunc.fixturenames:
            endings = ("",) if metafunc.function.__name__ in _WORDS_ONLY else ("", SPLIT)
            names = [f"{kind}{ending}" for kind in KINDS for ending in endings]
            metafunc.parametrize(_MODEL, [self._file(name) for name in names], ids=names)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Write ``crashed`` first; it stays the last line of a test that kills the process."""
        self._results.clear()
        self._write(test=nodeid, outcome="crashed", message="", results=[])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write the outcome of the test's call, or of a setup or teardown that did not pass."""
        if report.when == "call" or not report.passed:
            self._write(
                test=report.nodeid,
                outcome=report.outcome,
                message=_reason(report),
                results=list(self._results),
            )

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Write a line for a file that cannot be imported."""
        if not report.passed:
            self._write(
                test=report.nodeid, outcome="not imported", message=str(report.longrepr), results=[]
            )

    def pytest_sessionfinish(self) -> None:
        """Write the suite's status, or null without the suite."""
        suite = active_suite()
        self._write(status=None if suite is None else suite.status())

    def _write(self, **line: Any) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    # -- models ---------------------------------------------------------------------------------

    def _model_of(self, repo_id: str, filename: str, **_: Any) -> str:
        if repo_id not in DOWNLOADS:
            pytest.skip(f"no generated model replaces {repo_id}/{filename}")
        return self._file(DOWNLOADS[repo_id])

    def _file(self, name: str) -> str:
        return str(self._models / f"{name}.gguf")

    # -- wrappers -------------------------------------------------------------------------------

    def _one_by_one(self, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Make ``Llama`` evaluate token by token, so that logits are the same for any batches."""
        if not kwargs.get("embedding"):
            kwargs["n_ubatch"] = 1
        original(*args, **kwargs)

    def _sampled(self, original: Callable[..., int], sampler: Any, ctx: Any, idx: int = -1) -> int:
        n_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(ctx.model.model))
        row = llama_cpp.llama_get_logits_ith(ctx.ctx, idx)
        logits = np.ctypeslib.as_array(row, shape=(n_vocab,)).tobytes()
        token = original(sampler, ctx, idx)
        self._results.append(f"token {token} of logits {_digest(logits)}")
        return token

    def _completed(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        reply = original(*args, **kwargs)
        shown = {key: reply[key] for key in ("choices", "usage")}
        self._results.append(f"completion {json.dumps(shown)}")
        return reply

    def _embedded(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        values = original(*args, **kwargs)
        self._results.append(f"embeddings {_digest(np.array(values).tobytes())}")
        return values

    def _saved(self, original: Callable[..., Any], llama: Llama) -> Any:
        state = original(llama)
        tokens = state.input_ids[: state.n_tokens].tolist()
        self._results.append(f"state {_digest(state.llama_state)} of tokens {tokens}")
        return state


def _wrap(owner: type, name: str, around: Callable[..., Any]) -> None:
    original = getattr(owner, name)
    wrapper = functools.wraps(original)(lambda *args, **kwargs: around(original, *args, **kwargs))
    setattr(owner, name, wrapper)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _reason(report: pytest.TestReport) -> str:
    """Return where and why a test failed or was skipped.

    Memory addresses are masked, because they differ from process to process.
    """
    if isinstance(report.longrepr, tuple):
        return report.longrepr[2]
    crash = getattr(report.longrepr, "reprcrash", None)
    text = f"line {crash.lineno}: {crash.message}" if crash else str(report.longrepr or "")
    return re.sub(r"0x[0-9a-f]+", "0x…", text)

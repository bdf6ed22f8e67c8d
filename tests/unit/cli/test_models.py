"""Models that commands open: progress while a file is identified."""

from __future__ import annotations

import contextlib
import os
import re
import sys

import numpy as np
import pytest

from llmaas_eval.sizes.watching import Limits, watch
from llmaas_hooks import StoreError
from llmaas_plugins.cli import models
from llmaas_plugins.files import digest_cache
from llmaas_plugins.model import digest
from llmaas_plugins.model.digest import file_digest

N_BYTES = 96 << 20


class Bar:
    """Progress bar that remembers where it was."""

    def __init__(self, total):
        self.total, self.n, self.seen = total, 0, []

    def update(self, n):
        self.n += n
        self.seen.append(self.n)


@pytest.fixture
def bars(monkeypatch, tmp_path):
    """Return the bars that are shown; nothing is identified yet, and polls are quick."""
    made = []

    def progress_bar(_what, _unit, total):
        made.append(Bar(total))
        return contextlib.nullcontext(made[-1])

    monkeypatch.setattr(models, "progress_bar", progress_bar)
    monkeypatch.setattr(models, "progress_bar_on_copy", progress_bar)
    monkeypatch.setattr(models, "_POLL_S", 0.001)
    monkeypatch.setattr(digest, "_SETTLED_NS", -(1 << 62))
    monkeypatch.setattr(digest, "_known", {})
    monkeypatch.setattr(digest_cache, "_directory", lambda: tmp_path / "cache")
    return made


def test_a_file_is_read_once_and_with_progress(tmp_path, bars):
    path = tmp_path / "model.gguf"
    path.write_bytes(np.random.default_rng(0).bytes(N_BYTES))
    found = models.identified(path)
    (bar,) = bars
    assert bar.total == N_BYTES
    assert bar.seen == sorted(bar.seen)
    assert any(0 < n < N_BYTES for n in bar.seen)
    assert models.identified(path) == found == file_digest(path)
    assert len(bars) == 1


def test_a_model_is_opened_with_progress(bars, reference_model):
    with models.opening(reference_model) as opened:
        assert opened.n_embd() > 0
    (bar,) = bars
    assert bar.total == bar.seen[-1] == 100
    assert any(0 < n < 100 for n in bar.seen)


def test_the_progress_of_opening_is_seen_on_a_terminal(tmp_path, reference_model):
    code = (
        "import time\n"
        "from pathlib import Path\n"
        "from llmaas_plugins.cli import models\n"
        "from llmaas_plugins.model import loading\n"
        "callback = loading._callback\n"
        "def slow(progress):\n"
        "    return callback(lambda share: (time.sleep(0.05), progress(share)))\n"
        "loading._callback = slow\n"
        f"with models.opening(Path({str(reference_model)!r})): pass\n"
    )
    said = watch([sys.executable, "-c", code], os.environ, tmp_path, Limits(60, 8 << 30)).said
    assert any(re.search(r"opening .*\b[1-9]\d?%", line) for line in said), said


def test_what_cannot_be_read_is_said(tmp_path, bars):
    with pytest.raises(StoreError, match=r"cannot read .*none\.gguf"):
        models.identified(tmp_path / "none.gguf")
    assert not bars

"""Amounts count less the older they are."""

from __future__ import annotations

import math

import numpy as np
import pytest

from llmaas_plugins.memory import recent
from llmaas_plugins.memory.recent import TIME_S, RecentSums


def test_sums_fade(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(recent.time, "monotonic", lambda: now[0])
    sums = RecentSums(3)
    sums.add(1, 2.0)
    sums.add(np.array([2, 2]), np.array([1.0, 3.0]))
    assert sums.now().tolist() == [0, 2, 4]
    now[0] += TIME_S
    sums.add(1, 1.0)
    assert sums.now() == pytest.approx([0, 1 + 2 / math.e, 4 / math.e])

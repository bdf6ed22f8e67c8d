"""Reads of an engine by other threads while it is used."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from llmaas_patches.engine import LlamaEngine


class Ending(LlamaEngine):
    """Engine of which another thread ends a restore between any two looks."""

    llama = SimpleNamespace(_input_ids=[7])

    def __init__(self):
        self.left = [np.arange(3, dtype=np.int32)]

    @property
    def _before_restore(self):
        return self.left.pop() if self.left else None


def test_a_restore_may_end_while_its_tokens_are_read():
    engine = Ending()
    assert engine.resident_tokens().tolist() == [0, 1, 2]
    assert engine.resident_tokens().tolist() == [7]

"""A segment of format 1, written once: every later version reads it and writes the same bytes."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
from archived import assert_holds, fill

from llmaas_plugins.chats.exports import Conversation, Message
from llmaas_plugins.knn_lm.archive.archive import Archive
from llmaas_plugins.knn_lm.archive.pairs import Pairs
from llmaas_plugins.knn_lm.archive.record import Record
from llmaas_plugins.knn_lm.archive.segments import Binding

GOLDEN = Path(__file__).parents[2] / "data" / "golden" / "v1.segment"
BINDING = Binding(bytes(range(32)), 6, "final_norm")


def made(number, n_tokens):
    """Compute a record by arithmetic alone, because random generators may change."""
    tokens = np.arange(number, number + 7 * n_tokens, 7, dtype=np.int32)
    positions = np.arange(1, n_tokens, dtype=np.int32)
    keys = (np.arange(6 * len(positions)) - 40 * number) / 8
    p_max = (1 / (2 + positions)).astype(np.float32)
    messages = (Message("system", "Be brief."), Message("user", f"{number}, größer: 数字"))
    return Record(
        Conversation(f"№ {number}", "notes", messages),
        "conversations.json",
        1.7e9 + number / 4,
        tokens,
        positions,
        Pairs(keys.reshape(-1, 6).astype(np.float16), tokens[1:].copy(), p_max / 2, p_max),
    )


RECORDS = [made(1, 9), made(2, 1), made(3, 70)]


def test_segment_of_format_1_is_read(tmp_path):
    shutil.copy(GOLDEN, tmp_path / "000000.0.segment")
    with Archive.open(tmp_path, BINDING) as archive:
        assert_holds(archive, RECORDS)
        assert [info.number for info in archive.conversations()] == [0, 1, 2]


def test_segment_is_written_as_ever(tmp_path):
    fill(tmp_path, RECORDS, BINDING)
    assert (tmp_path / "000000.0.segment").read_bytes() == GOLDEN.read_bytes()

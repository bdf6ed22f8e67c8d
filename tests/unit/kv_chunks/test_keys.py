"""Chunk identities: equal prefixes have equal keys, and all others differ."""

from __future__ import annotations

import numpy as np
import pytest

from llmaas_plugins.kv_chunks.store.chunk_ids import CHUNK_TOKENS, chain

ROOT = bytes(32)


def tokens(*values):
    return np.array(values, dtype=np.int32)


def test_chunks_cover_the_tokens_in_order():
    wanted = np.arange(40, dtype=np.int32)
    ids = chain(ROOT, wanted)
    assert [len(chunk.tokens) // 4 for chunk in ids] == [16, 16, 8]
    assert b"".join(chunk.tokens for chunk in ids) == wanted.astype("<i4").tobytes()
    assert [chunk.parent for chunk in ids] == [ROOT, ids[0].key, ids[1].key]
    assert all(len(chunk.key) == 32 for chunk in ids)


def test_shared_prefix_has_the_same_ids_until_the_first_difference():
    a = np.arange(64, dtype=np.int32)
    b = a.copy()
    b[40] += 1
    first, second = chain(ROOT, a), chain(ROOT, b)
    assert first[:2] == second[:2]
    assert not {chunk.key for chunk in first[2:]} & {chunk.key for chunk in second}
    assert first[3].tokens == second[3].tokens  # the same text after another prefix


def test_partial_last_chunk_is_not_the_full_one():
    longer = np.arange(2 * CHUNK_TOKENS, dtype=np.int32)
    whole, part = chain(ROOT, longer), chain(ROOT, longer[:-1])
    assert whole[0] == part[0]
    assert whole[1].key != part[1].key
    assert whole[1].tokens.startswith(part[1].tokens)


def test_root_decides_every_key():
    a, b = chain(ROOT, tokens(1, 2, 3)), chain(b"\1" * 32, tokens(1, 2, 3))
    assert a[0].key != b[0].key


def test_no_tokens_have_no_chunks():
    assert chain(ROOT, tokens()) == []


@pytest.mark.parametrize("dtype", ["<i4", ">i4", "i8", "u2"])
def test_ids_do_not_depend_on_how_the_tokens_are_kept(dtype):
    values = np.arange(100, 120)
    spread = np.repeat(values, 2).astype(dtype)[::2]
    assert chain(ROOT, spread) == chain(ROOT, values.astype(np.int32))

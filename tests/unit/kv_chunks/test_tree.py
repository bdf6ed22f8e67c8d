"""Chunks as a forest: prompts find their stored prefix, and contexts share common chunks."""

from __future__ import annotations

import numpy as np
import pytest

from llmaas_plugins.kv_chunks.store.chunk_ids import chain
from llmaas_plugins.kv_chunks.store.tree import Chunk, ChunkTree

ROOT = bytes(32)


def text(*parts):
    """Return token ids from (first, count) pairs."""
    return np.concatenate([np.arange(a, a + n, dtype=np.int32) for a, n in parts])


def store(tree, tokens, root=ROOT):
    """Add the missing chunks of ``tokens``; return all of its chunks."""
    path = []
    for wanted in chain(root, tokens):
        chunk = tree.get(wanted.key)
        if chunk is None:
            chunk = Chunk(wanted, 100)
            tree.add(chunk)
        path.append(chunk)
    return path


@pytest.fixture
def tree():
    return ChunkTree()


def test_exact_match(tree):
    path = store(tree, text((0, 40)))
    assert tree.match(ROOT, text((0, 40))) == (path, 40)
    assert [chunk.n_tokens for chunk in path] == [16, 16, 8]
    assert len(tree) == 3
    assert set(tree) == set(path)


def test_the_path_to_a_context(tree):
    path = store(tree, text((0, 40)))
    assert tree.path_to("mail") == []
    tree.set_head("mail", path[1].id.key)
    assert tree.path_to("mail") == path[:2]
    tree.remove(path[2])
    assert tree.path_to("mail") == path[:2]


def test_longer_prompt_gets_all_of_a_stored_partial_chunk(tree):
    path = store(tree, text((0, 40)))
    assert tree.match(ROOT, text((0, 100))) == (path, 40)


def test_shorter_prompt_gets_the_beginning_of_a_chunk(tree):
    path = store(tree, text((0, 48)))
    assert tree.match(ROOT, text((0, 37))) == (path, 37)
    assert tree.match(ROOT, text((0, 32))) == (path[:2], 32)


def test_diverging_prompt_gets_what_is_common(tree):
    path = store(tree, text((0, 48)))
    assert tree.match(ROOT, text((0, 20), (900, 30))) == (path[:2], 20)
    assert tree.match(ROOT, text((0, 16), (900, 30))) == (path[:1], 16)
    assert tree.match(ROOT, text((900, 30))) == ([], 0)


def test_tokens_are_compared_whole(tree):
    store(tree, np.array([0x01020304] * 16, np.int32))
    assert tree.match(ROOT, np.array([0x05020304] * 16, np.int32)) == ([], 0)


def test_closest_of_several_siblings_is_taken(tree):
    store(tree, text((0, 16), (100, 16)))
    near = store(tree, text((0, 16), (200, 8), (300, 8)))
    store(tree, text((0, 16), (200, 4), (400, 12)))
    assert tree.match(ROOT, text((0, 16), (200, 7), (500, 9))) == (near, 23)


def test_same_tokens_behind_another_root_do_not_match(tree):
    store(tree, text((0, 32)))
    assert tree.match(b"\1" * 32, text((0, 32))) == ([], 0)


def test_match_ends_where_a_chunk_is_missing(tree):
    path = store(tree, text((0, 64)))
    tree.remove(path[1])
    assert tree.match(ROOT, text((0, 64))) == (path[:1], 16)
    tree.add(path[1])
    assert tree.match(ROOT, text((0, 64))) == (path, 64)


def test_no_tokens_match_nothing(tree):
    store(tree, text((0, 16)))
    assert tree.match(ROOT, text((0, 0))) == ([], 0)


def test_head_moves_and_names_the_one_it_left(tree):
    path = store(tree, text((0, 40)))
    assert tree.set_head("a", path[1].id.key) is None
    assert tree.set_head("a", path[1].id.key) is None
    assert tree.set_head("a", path[2].id.key) is path[1]
    assert (path[1].heads, path[2].heads) == (set(), {"a"})
    assert tree.contexts() == {"a": path[2].id.key}
    assert tree.set_head("b", b"unknown") is None
    assert "b" not in tree.contexts()


def test_context_that_loses_its_end_ends_earlier(tree):
    path = store(tree, text((0, 40)))
    tree.set_head("a", path[2].id.key)
    tree.set_head("b", path[2].id.key)
    tree.remove(path[2])
    assert tree.contexts() == {"a": path[1].id.key, "b": path[1].id.key}
    tree.remove(path[1])
    tree.remove(path[0])
    assert tree.contexts() == {}
    assert len(tree) == 0


def test_forgotten_context_gives_up_what_nobody_shares(tree):
    a = store(tree, text((0, 32), (100, 32)))
    b = store(tree, text((0, 32), (200, 16)))
    tree.set_head("a", a[-1].id.key)
    tree.set_head("b", b[-1].id.key)
    assert tree.forget_context("a") == [a[3], a[2]]
    assert tree.contexts() == {"b": b[-1].id.key}
    assert tree.forget_context("a") == []
    for chunk in (a[3], a[2]):
        tree.remove(chunk)
    assert tree.forget_context("b") == [b[2], b[1], b[0]]


def test_context_inside_another_gives_up_nothing(tree):
    long = store(tree, text((0, 64)))
    tree.set_head("long", long[-1].id.key)
    tree.set_head("short", long[1].id.key)
    assert tree.forget_context("short") == []
    tree.set_head("short", long[1].id.key)
    assert tree.forget_context("long") == [long[3], long[2]]


def test_unneeded_chunks_may_be_removed_as_they_come(tree):
    a = store(tree, text((0, 48)))
    b = store(tree, text((0, 16), (500, 16)))
    tree.set_head("b", b[-1].id.key)
    for chunk in tree.removable_from(a[-1]):
        tree.remove(chunk)
    assert set(tree) == set(b)
    assert list(tree.removable_from(b[-1])) == []
    assert list(tree.removable_from(None)) == []


def test_partial_chunk_is_superseded_by_its_continuation(tree):
    part = store(tree, text((0, 20)))[-1]
    other = store(tree, text((0, 16), (700, 4)))[-1]
    longer, whole = chain(ROOT, text((0, 25)))[-1], chain(ROOT, text((0, 32)))[-1]
    assert tree.superseded_by(longer) == [part]
    assert tree.superseded_by(whole) == [part]
    assert tree.superseded_by(part.id) == []
    tree.set_head("a", part.id.key)
    assert tree.superseded_by(whole) == []
    assert tree.superseded_by(chain(ROOT, text((0, 16), (700, 16)))[-1]) == [other]


def test_what_continues_a_chunk(tree):
    a, b = store(tree, text((0, 70))), store(tree, text((0, 32), (500, 20)))
    assert tree.subtree(a[4]) == [a[4]]
    behind = tree.subtree(a[1])
    assert behind[0] is a[1]
    assert set(behind) == {*a[1:], *b[2:]}
    assert all(behind.index(a[i]) < behind.index(a[i + 1]) for i in (1, 2, 3))

"""Finding the stored prefix of a prompt, against a comparison with all stored texts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmaas_plugins.kv_chunks.store.chunk_ids import CHUNK_TOKENS, chain
from llmaas_plugins.kv_chunks.store.tree import Chunk, ChunkTree

ROOTS = (bytes(32), b"\1" * 32)


@st.composite
def texts(draw):
    """Draw texts that often begin alike: runs of one of two tokens."""
    runs = draw(st.lists(st.tuples(st.integers(0, 1), st.integers(1, 24)), max_size=5))
    return np.repeat(*np.array(runs, np.int32).reshape(-1, 2).T)


stored = st.lists(st.tuples(st.sampled_from(ROOTS), texts()), max_size=6)


def make_tree(contexts, removed):
    tree = ChunkTree()
    for root, tokens in contexts:
        for wanted in chain(root, tokens):
            if tree.get(wanted.key) is None:
                tree.add(Chunk(wanted, 1))
    for i in removed:
        chunks = list(tree)
        if chunks:
            tree.remove(chunks[i % len(chunks)])
    return tree


def reachable(tree, root, tokens):
    """Return the tokens of a text's leading chunks that are still there."""
    n = 0
    for wanted in chain(root, tokens):
        if tree.get(wanted.key) is None:
            break
        n += len(wanted.tokens) // 4
    return tokens[:n]


def common(a, b):
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(stored, st.lists(st.integers(0, 99), max_size=3), texts())
def test_match_is_the_longest_common_beginning(contexts, removed, prompt):
    tree = make_tree(contexts, removed)
    path, n_tokens = tree.match(ROOTS[0], prompt)
    candidates = [reachable(tree, root, tokens) for root, tokens in contexts if root is ROOTS[0]]
    assert n_tokens == max((common(found, prompt) for found in candidates), default=0)
    tokens = np.frombuffer(b"".join(chunk.id.tokens for chunk in path), "<i4")
    assert (tokens[:n_tokens] == prompt[:n_tokens]).all()
    assert len(tokens) - CHUNK_TOKENS < n_tokens <= len(tokens)
    parents = [ROOTS[0], *(chunk.id.key for chunk in path)]
    assert [chunk.id.parent for chunk in path] == parents[:-1]


@settings(max_examples=100, deadline=None)
@given(stored, st.data())
def test_contexts_need_exactly_what_leads_to_their_heads(contexts, data):
    """Forgetting all contexts but some leaves exactly the chunks of those."""
    tree = make_tree(contexts, [])
    for i, (root, tokens) in enumerate(contexts):
        if len(tokens):
            tree.set_head(str(i), chain(root, tokens)[-1].key)
    kept = data.draw(st.sets(st.sampled_from(range(len(contexts) or 1))))
    for i in range(len(contexts)):
        if i not in kept:
            for chunk in tree.forget_context(str(i)):
                tree.remove(chunk)
    wanted = [chain(*contexts[i]) for i in kept if i < len(contexts)]
    assert {chunk.id for chunk in tree} == {one for ids in wanted for one in ids}
    assert set(tree.contexts()) == {
        str(i) for i in kept if i < len(contexts) and chain(*contexts[i])
    }

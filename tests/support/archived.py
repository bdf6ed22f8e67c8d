"""Small, distinct conversations to store in archives."""

from __future__ import annotations

import numpy as np

from llmaas_plugins.chats.exports import Conversation, Message
from llmaas_plugins.knn_lm.archive.archive import Archive
from llmaas_plugins.knn_lm.archive.files import SELECTED
from llmaas_plugins.knn_lm.archive.pairs import Pairs
from llmaas_plugins.knn_lm.archive.record import Record, conversation_id
from llmaas_plugins.knn_lm.archive.segments import Binding
from llmaas_plugins.knn_lm.datastore.datastore import Datastore

N_EMBD = 24
BINDING = Binding(b"f" * 32, N_EMBD, "ffn_input")


def record(seed, n_tokens=9, n_embd=N_EMBD, app="mail"):
    """Return a conversation derived from ``seed``; each token but the first is a target."""
    rng = np.random.default_rng(seed)
    messages = (
        Message("user", f"question {seed}: wo ist mein Schlüssel?"),
        Message("assistant", f"answer {seed}: 钥匙在桌上"),
    )
    tokens = rng.integers(0, 50_000, n_tokens).astype(np.int32)
    n_pairs = max(0, n_tokens - 1)
    p_max = rng.random(n_pairs, np.float32)
    pairs = Pairs(
        keys=rng.standard_normal((n_pairs, n_embd)).astype(np.float16),
        values=tokens[1:].copy(),
        p_lm=p_max * rng.random(n_pairs, np.float32),
        p_max=p_max,
    )
    positions = np.arange(1, n_pairs + 1, dtype=np.int32)
    conversation = Conversation(f"title {seed}", app, messages)
    return Record(conversation, "export.json", 1_700_000_000.0 + seed, tokens, positions, pairs)


def record_id(one):
    return conversation_id(one.conversation)


def fill(directory, records, binding=BINDING):
    """Add conversations to the archive in a directory."""
    with Archive.open(directory, binding, writable=True) as archive:
        for one in records:
            archive.append(one)


def same(pairs, wanted):
    """Return whether pairs are equal, bit for bit."""
    names = ("keys", "values", "p_lm", "p_max")
    return all(np.array_equal(getattr(pairs, n), getattr(wanted, n)) for n in names)


def assert_holds(archive, records):
    """Assert that the archive holds exactly these conversations, in this order, in every part."""
    ids = [record_id(one) for one in records]
    assert archive.ids() == ids
    infos = archive.conversations()
    first = 0
    for one, id_, info in zip(records, ids, infos, strict=True):
        conversation = one.conversation
        assert (info.id, info.title, info.app) == (id_.hex(), conversation.title, conversation.app)
        assert (info.source, info.added) == (one.source, one.added)
        assert (info.n_tokens, info.n_pairs) == (len(one.tokens), len(one.pairs))
        assert archive.messages(id_) == conversation.messages
        assert np.array_equal(archive.tokens(id_), one.tokens)
        own = np.arange(first, first + len(one.pairs))
        assert same(archive.pairs(own), one.pairs)
        origin = archive.origin(own)
        assert (origin.numbers == info.number).all()
        assert np.array_equal(origin.positions, one.positions)
        first += len(one.pairs)
    assert archive.n_pairs == first
    assert len({info.number for info in infos}) == len(infos)


def select(store, *picks):
    """Write a selected datastore that keeps the given rows of each record."""
    keys = [one.pairs.keys[rows] for one, rows in picks]
    values = [one.pairs.values[rows] for one, rows in picks]
    origins = [(i, at) for i, (one, rows) in enumerate(picks) for at in one.positions[rows]]
    Datastore.write(
        store / SELECTED,
        fingerprint=BINDING.fingerprint,
        keys=np.concatenate(keys),
        values=np.concatenate(values),
        origins=np.array(origins, np.int32),
        conversations=[record_id(one).hex() for one, _ in picks],
        basis=None,
        settings={"k": 100},
    )

"""A small datastore of the packaged model, and a brute-force search in it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import pickle
from typing import Any

import numpy as np
from llama_cpp import Llama

from llmaas_hooks import hookimpl
from llmaas_plugins import activate
from llmaas_plugins.chats.exports import Conversation, Message
from llmaas_plugins.knn_lm.archive.archive import Archive
from llmaas_plugins.knn_lm.archive.files import SELECTED
from llmaas_plugins.knn_lm.archive.fingerprint import fingerprint
from llmaas_plugins.knn_lm.archive.pairs import Pairs
from llmaas_plugins.knn_lm.archive.record import Record
from llmaas_plugins.knn_lm.archive.segments import Binding
from llmaas_plugins.knn_lm.build.encoder import Encoder
from llmaas_plugins.knn_lm.build.ingest import add_conversations, binding_of, tokens_of
from llmaas_plugins.knn_lm.datastore.datastore import Datastore
from llmaas_plugins.knn_lm.mixing.mixture import Mixture

ENGINE = {"n_ctx": 256, "n_threads": 1, "n_threads_batch": 1, "seed": 1, "verbose": False}
MIXTURE = Mixture(alpha=0.7, beta=0.25, theta=40.0, far=120.0)
K = 16
CONVERSATIONS = tuple(
    Conversation(question, "chat", (Message("user", question), Message("assistant", answer)), True)
    for question, answer in (
        ("Where does Bruno sleep?", "Bruno sleeps in the old boat behind the station."),
        ("Who feeds Bruno?", "Anna feeds Bruno at seven, before she takes the boat to work."),
        ("What does Anna drink?", "Anna drinks green tea with honey, and never any coffee."),
        ("When is the boat?", "The boat leaves at half past seven from the pier in Oslo."),
        ("What is for dinner?", "Dinner is fish with potatoes, and green tea with honey."),
        ("Where is the key?", "The key is under the green stone behind the old boat."),
    )
)
QUESTIONS = (
    "Where does Bruno sleep?",
    "Tell me, when is the boat to work?",
    "I want to fly to Rome. What do I do?",
)
"""A question that is in the datastore, one that is close to it, and an unrelated one."""


@dataclasses.dataclass(frozen=True)
class Stored:
    """Everything that a datastore is written from."""

    fingerprint: bytes
    keys: Any
    values: Any
    weights: Any
    origins: Any
    key: str
    _written: dict[bytes, bytes] = dataclasses.field(default_factory=dict, init=False)

    def write(self, directory, **options):
        """Write a datastore into a directory and return its path; see ``select``.

        To write a datastore takes as long as a short answer. The first one of its kind is therefore
        kept, and the others are copies.
        """
        directory.mkdir(parents=True, exist_ok=True)
        kind = pickle.dumps(options)
        if kind not in self._written:
            self._written[kind] = self.select(directory, **options).read_bytes()
            return directory / SELECTED
        copy = directory / f"{SELECTED}.copy"
        copy.touch(mode=0o600)
        copy.write_bytes(self._written[kind])
        return copy.replace(directory / SELECTED)

    def select(self, directory, *, rows=slice(None), owners=None, **settings):
        """Write all rows or some of them into a directory and return the datastore's path.

        Args:
            directory: Directory of the new datastore.
            rows: Pairs to write.
            owners: App of each conversation.
            **settings: Settings that replace the defaults.
        """
        Datastore.write(
            directory / SELECTED,
            fingerprint=self.fingerprint,
            keys=self.keys[rows],
            values=self.values[rows],
            weights=self.weights[rows],
            origins=self.origins[rows],
            conversations=[one.title for one in CONVERSATIONS],
            basis=None,
            owners=owners,
            settings={"mixture": MIXTURE.as_json(), "skip_above": 1.0, "key": self.key} | settings,
        )
        return directory / SELECTED

    def probabilities(self, state, logits, mixture=MIXTURE, k=K):
        """Return each token's mixed probability for a hidden state and the model's ``logits``."""
        distances = ((self.keys.astype(np.float64) - state) ** 2).sum(axis=1)
        nearest = np.argsort(distances, kind="stable")[:k]
        p_lm = softmax(logits)
        hits = self.values[nearest] == np.arange(len(logits))[:, None]
        p = mixture.probability(
            np.broadcast_to(distances[nearest], hits.shape).astype(np.float32),
            hits,
            np.broadcast_to(self.weights[nearest], hits.shape),
            p_lm,
            p_lm.max(),
        )
        return np.where(np.isneginf(logits), 0.0, p)


class Natives:
    """Plugin that collects contexts in which hidden states can be read."""

    def __init__(self):
        self.by_ctx = {}

    @hookimpl
    def llmaas_native_context(self, context):
        self.by_ctx[context.ctx] = context


@contextlib.contextmanager
def filling(model, directory):
    """Open an archive for a model; yield the engine, and a function that adds chats to it.

    The function returns the archive. No suite may be active.
    """
    natives = Natives()
    with (
        activate({"on_error": "raise", "plugins": {}}, {"natives": natives}),
        contextlib.closing(Llama(str(model), **ENGINE)) as llama,
        Encoder(llama, natives.by_ctx, "ffn_input") as encoder,
        Archive.open(directory, binding_of(llama, "ffn_input"), writable=True) as archive,
    ):

        def add(chats):
            add_conversations(archive, llama, encoder, [(chat, "test") for chat in chats])
            return archive

        yield llama, add


@functools.cache
def stored(model, key="ffn_input", lora=None):
    """Return all pairs of the conversations, computed once per process; no suite may be active."""
    natives = Natives()
    adapter = {} if lora is None else {"lora_path": str(lora)}
    with (
        activate({"on_error": "raise", "plugins": {}}, {"natives": natives}),
        contextlib.closing(Llama(str(model), **ENGINE, **adapter)) as llama,
        Encoder(llama, natives.by_ctx, key) as encoder,
    ):
        found = [encoder.encode(tokens_of(llama, one)) for one in CONVERSATIONS]
        mark = fingerprint(llama)
    keys = np.concatenate([one.pairs.keys for one in found])
    origins = [(i, at) for i, one in enumerate(found) for at in one.positions]
    return Stored(
        fingerprint=mark,
        keys=keys,
        values=np.concatenate([one.pairs.values for one in found]),
        weights=np.random.default_rng(0).integers(1, 4, len(keys)).astype(np.float32),
        origins=np.array(origins, np.int32),
        key=key,
    )


def built(model, directory):
    """Build a datastore, and the archive of conversations that drafts are taken from."""
    pairs = stored(model)
    pairs.write(directory)
    binding = Binding(pairs.fingerprint, pairs.keys.shape[1], pairs.key)
    with (
        contextlib.closing(Llama(str(model), vocab_only=True, verbose=False)) as llama,
        Archive.open(directory, binding, writable=True) as archive,
    ):
        for i, one in enumerate(CONVERSATIONS):
            mine = pairs.origins[:, 0] == i
            tokens, at = tokens_of(llama, one), pairs.origins[mine, 1]
            p = np.full(mine.sum(), 0.5, np.float32)
            found = Pairs(pairs.keys[mine], pairs.values[mine], p, p)
            archive.append(Record(one, "test", 0.0, tokens, at, found))
    return directory


def softmax(logits):
    powers = np.exp(logits.astype(np.float64) - logits.max())
    return powers / powers.sum()

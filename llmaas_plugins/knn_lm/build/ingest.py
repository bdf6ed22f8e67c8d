"""Conversion of conversations into pairs in the archive, one conversation at a time; resumable."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from llmaas_hooks import LlmaasError, ModelLoad, Tokens
from llmaas_hooks.native import States
from llmaas_plugins.chats.exports import Conversation
from llmaas_plugins.chats.prompts import conversation_tokens
from llmaas_plugins.knn_lm.archive.archive import Archive
from llmaas_plugins.knn_lm.archive.fingerprint import fingerprint
from llmaas_plugins.knn_lm.archive.record import Record, conversation_id
from llmaas_plugins.knn_lm.archive.segments import Binding
from llmaas_plugins.knn_lm.archive.suppression import SuppressionList
from llmaas_plugins.knn_lm.build.encoder import EncodedConversation, Encoder

__all__ = ["IngestCounts", "add_conversations", "binding_of", "tokens_of"]

_log = logging.getLogger("llmaas.knn_lm")


class IngestCounts(NamedTuple):
    """Counts of how ``add_conversations`` treated the conversations.

    Attributes:
        n_added: Conversations added now.
        n_known: Conversations that were in the archive already.
        n_left_out: Conversations left out because they have fewer than two tokens, or hidden states
            that are too large for float16.
        n_refused: Conversations left out because the model's chat template refused them.
        n_pairs: Pairs added.
        n_forgotten: Conversations left out because they were forgotten earlier.
    """

    n_added: int = 0
    n_known: int = 0
    n_left_out: int = 0
    n_refused: int = 0
    n_pairs: int = 0
    n_forgotten: int = 0


def binding_of(llama: Any, key: States, load: ModelLoad | None = None) -> Binding:
    """Return the binding of an archive to the model of ``llama``, which was opened by ``load``.

    Raises:
        StoreError: It is unknown which model was loaded.
    """
    return Binding(fingerprint(llama, load), int(llama.n_embd()), key)


def tokens_of(llama: Any, conversation: Conversation) -> Tokens:
    """Return a conversation as tokens, formatted by the chat handler of ``llama``.

    Raises:
        ValueError: The chat handler refuses this conversation; for example, some require that user
            and assistant take turns.
        LlmaasError: The chat handler does not make tokens.
    """
    messages = [{"role": m.role, "content": m.content} for m in conversation.messages]
    try:
        tokens = conversation_tokens(llama, messages)
    except Exception as error:  # a chat template is code from the model file; it may raise anything
        raise ValueError(
            f"the chat template refuses conversation {conversation.title!r}: {error}"
        ) from error
    if tokens is None:
        raise LlmaasError(
            f"chat format {llama.chat_format!r} makes no text prompt of conversation "
            f"{conversation.title!r}. Use a model or chat format for text."
        )
    return np.asarray(tokens, np.int32)


def add_conversations(  # noqa: PLR0913 -- four inputs, two callbacks and a flag
    archive: Archive,
    llama: Any,
    encoder: Encoder,
    conversations: Iterable[tuple[Conversation, str]],
    *,
    progress: Callable[[int], None] = lambda _n: None,
    between: Callable[[], None] = lambda: None,
    again: bool = False,
) -> IngestCounts:
    """Add conversations; each is stored when it is evaluated, so this can be interrupted any time.

    Args:
        archive: Archive that is open for writing, for the model of ``llama``.
        llama: Engine whose chat handler turns the conversations into tokens.
        encoder: Encoder that evaluates the tokens.
        conversations: Each conversation with the name of the file that it came from.
        progress: Called with numbers of characters whose conversations, or parts of them, are done.
        between: Called between batches; an exception that it raises ends the work.
        again: Whether to add conversations that were forgotten earlier.

    Raises:
        StoreError: The archive or the list of forgotten conversations is damaged, or the disk
            failed.
    """
    done, suppressed = IngestCounts(), SuppressionList(archive.directory)
    for conversation, source in conversations:
        told = _Told(conversation.n_characters, progress)
        encode = partial(encoder.encode, between=between, progress=told.share)
        id_ = conversation_id(conversation)
        if id_ in archive:
            done = done._replace(n_known=done.n_known + 1)
        elif id_ in suppressed and not again:
            done = done._replace(n_forgotten=done.n_forgotten + 1)
        elif (tokens := _readable(llama, conversation)) is None:
            done = done._replace(n_refused=done.n_refused + 1)
        elif (record := _record(encode, conversation, source, tokens)) is None:
            done = done._replace(n_left_out=done.n_left_out + 1)
        else:
            archive.append(record)
            suppressed.discard(id_)
            n_pairs = done.n_pairs + len(record.pairs)
            done = done._replace(n_added=done.n_added + 1, n_pairs=n_pairs)
        told.share(1)
    return done


class _Told:
    """Progress within a conversation, told in characters."""

    def __init__(self, n_characters: int, progress: Callable[[int], None]) -> None:
        self._n_left = self._n_all = n_characters
        self._progress = progress

    def share(self, done: float) -> None:
        """Tell how many more characters are done, now that this share of all is."""
        n_left = self._n_all - int(done * self._n_all)
        self._progress(self._n_left - n_left)
        self._n_left = n_left


def _readable(llama: Any, conversation: Conversation) -> Tokens | None:
    """Return a conversation's tokens, or None, with a warning, if the chat template refuses it."""
    try:
        return tokens_of(llama, conversation)
    except ValueError as error:
        _log.warning("left out: %s", error)
        return None


def _record(
    encode: Callable[[Tokens], EncodedConversation],
    conversation: Conversation,
    source: str,
    tokens: Tokens,
) -> Record | None:
    """Evaluate a conversation; return None if it yields no usable pairs."""
    if len(tokens) < 2:
        return None
    found = encode(tokens)
    if not np.isfinite(found.pairs.keys).all():
        return None
    return Record(conversation, source, time.time(), tokens, found.positions, found.pairs)

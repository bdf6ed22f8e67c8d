"""Description of a stored conversation."""

from __future__ import annotations

from dataclasses import dataclass

from llmaas_plugins.knn_lm.archive.segments import ArchiveSegment, StoredRecord

__all__ = ["ConversationInfo", "conversation_info"]


@dataclass(frozen=True, slots=True)
class ConversationInfo:
    """A conversation in the archive, without its messages.

    Attributes:
        number: The conversation's number, which the archive never gives to another conversation.
        id: The conversation's id in hexadecimal digits, derived from its app, title and messages.
        title: The conversation's title.
        app: App that the conversation belongs to.
        is_shared: Whether the conversation belongs to no app, so that every app may use it.
        source: Name of the file that the conversation came from.
        added: Time when the conversation was added, in seconds since 1970.
        n_messages: Number of messages.
        n_tokens: Number of tokens.
        n_pairs: Number of pairs made from the conversation.
        n_bytes: Bytes that the conversation takes on disk.
    """

    number: int
    id: str
    title: str
    app: str
    is_shared: bool
    source: str
    added: float
    n_messages: int
    n_tokens: int
    n_pairs: int
    n_bytes: int


def conversation_info(segment: ArchiveSegment, stored: StoredRecord) -> ConversationInfo:
    """Describe a record of a segment.

    Raises:
        StoreError: The record is damaged.
    """
    meta, header = segment.meta(stored), stored.header
    conversation = meta.conversation
    return ConversationInfo(
        header.number, header.id.hex(), conversation.title, conversation.app,
        conversation.is_shared, meta.source, meta.added, len(conversation.messages),
        header.n_tokens, header.n_pairs, header.n_bytes,
    )  # fmt: skip

"""Contents and byte layout of one conversation in the archive.

A record is a header and four parts, all little-endian. Each part begins at a multiple of 64 bytes;
records and keys begin at a multiple of 4096 bytes, so a key of 2048 numbers is one page on disk::

    header   magic, length, id, number, sizes, checksums; BLAKE2b-64 of the header
    meta     UTF-8 JSON: title, app, source, added, messages
    tokens   int32
    columns  int32 position, float32 p_lm, float32 p_max, uint32 CRC-32C of the key; one a pair
    keys     float16 (n_pairs, n_embd)

Every part, and every key, has its own CRC-32C, so a few keys can be read and verified alone.
Targets are not stored separately: they are the tokens at the pairs' positions.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace

import numpy as np
import numpy.typing as npt

from llmaas_plugins._native import crc32c, knn_sum
from llmaas_plugins.chats.exports import NO_APP, Conversation, Message
from llmaas_plugins.files.json_text import parse_json
from llmaas_plugins.knn_lm.archive.pairs import Pairs

__all__ = [
    "COLUMNS",
    "HEADER_BYTES",
    "ID_BYTES",
    "PAGE",
    "Record",
    "RecordHeader",
    "RecordMetadata",
    "Unsound",
    "conversation_id",
    "decode_meta",
    "encode_record",
]

PAGE = 4096
ID_BYTES = 16
HEADER_BYTES = 128
COLUMNS = np.dtype([("position", "<i4"), ("p_lm", "<f4"), ("p_max", "<f4"), ("key_sum", "<u4")])

_ALIGN = 64
_MAGIC = b"LLMAASRC"
_LAYOUT = struct.Struct("<8sQ16s8I")
_DIGEST_BYTES = 8
_MOST_SECONDS = 1e11  # dates below this have a year of four digits


class Unsound(ValueError):  # noqa: N818 - internal to the archive: StoreError adds the place
    """Bytes that differ from what was written; the message says what was found and expected."""


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """A conversation to add.

    Attributes:
        conversation: Title, app and messages.
        source: Name of the file that the conversation came from.
        added: Time of adding, in seconds since 1970.
        tokens: Tokens of the conversation, shape (n_tokens,) int32.
        positions: Position in ``tokens`` of each pair's target, shape (n_pairs,) int32.
        pairs: Pairs of the conversation.
    """

    conversation: Conversation
    source: str
    added: float
    tokens: npt.NDArray[np.int32]
    positions: npt.NDArray[np.int32]
    pairs: Pairs

    def __post_init__(self) -> None:
        """Refuse fields that contradict each other.

        Raises:
            ValueError: Targets are not the tokens at their positions, or a number is not finite.
        """
        tokens, positions = self.tokens, self.positions
        if tokens.dtype != np.int32 or tokens.ndim != 1 or positions.dtype != np.int32:
            raise ValueError("tokens and positions must be int32, of one dimension")
        if positions.shape != (len(self.pairs),) or not _within(positions, len(tokens)):
            raise ValueError(f"expected one position below {len(tokens)} for each pair")
        if not np.array_equal(tokens[positions], self.pairs.values):
            raise ValueError("the pairs' values are not the tokens at their positions")
        for name in ("keys", "p_lm", "p_max"):
            if not np.isfinite(getattr(self.pairs, name)).all():
                raise ValueError(f"{name} has numbers that are not finite")


@dataclass(frozen=True, slots=True)
class RecordMetadata:
    """Metadata of a stored conversation."""

    conversation: Conversation
    source: str
    added: float


@dataclass(frozen=True, slots=True)
class RecordHeader:
    """Sizes and checksums of a record, and offsets of its parts from its first byte."""

    n_bytes: int
    id: bytes
    number: int
    n_embd: int
    n_tokens: int
    n_pairs: int
    n_meta: int
    meta_sum: int
    tokens_sum: int
    columns_sum: int

    @property
    def tokens_at(self) -> int:
        """Offset of the tokens."""
        return _up(HEADER_BYTES + self.n_meta, _ALIGN)

    @property
    def columns_at(self) -> int:
        """Offset of the pairs' columns."""
        return _up(self.tokens_at + 4 * self.n_tokens, _ALIGN)

    @property
    def keys_at(self) -> int:
        """Offset of the keys."""
        return _up(self.columns_at + COLUMNS.itemsize * self.n_pairs, PAGE)

    @property
    def key_bytes(self) -> int:
        """Bytes of one key."""
        return 2 * self.n_embd

    @property
    def end(self) -> int:
        """Bytes of the whole record, computed from the sizes of its parts."""
        return _up(self.keys_at + self.key_bytes * self.n_pairs, PAGE)

    def pack(self) -> bytes:
        """Return the header's bytes."""
        packed = _LAYOUT.pack(_MAGIC, *astuple(self))
        return (packed + _digest(packed)).ljust(HEADER_BYTES, b"\0")

    @classmethod
    def unpack(cls, data: bytes, n_embd: int) -> RecordHeader:
        """Read a header.

        Raises:
            Unsound: The bytes are not a header, are damaged, or have sizes that contradict each
                other.
        """
        packed, found = data[: _LAYOUT.size], data[_LAYOUT.size : _LAYOUT.size + _DIGEST_BYTES]
        if len(data) < HEADER_BYTES:
            raise Unsound(f"found {len(data)} bytes, expected a header of {HEADER_BYTES}")
        if not packed.startswith(_MAGIC):
            raise Unsound(f"found {data[:8]!r}, expected {_MAGIC!r} at its beginning")
        if found != _digest(packed):
            raise Unsound(
                f"found a header with checksum {_digest(packed).hex()}, expected {found.hex()}"
            )
        header = cls(*_LAYOUT.unpack(packed)[1:])
        if header.n_embd != n_embd:
            raise Unsound(f"found keys of {header.n_embd} numbers, expected {n_embd}")
        if header.n_bytes != header.end:
            raise Unsound(f"found a length of {header.n_bytes}, expected {header.end} by its parts")
        return header


def conversation_id(conversation: Conversation) -> bytes:
    """Return the 16-byte id of a conversation, derived from its app, title and messages.

    An app may have the name that stands for none.
    """
    messages = [(message.role, message.content) for message in conversation.messages]
    is_own = not conversation.is_shared and conversation.app == NO_APP
    owner = [conversation.app] if is_own else conversation.app
    text = json.dumps([owner, conversation.title, messages])
    return hashlib.blake2b(text.encode(), digest_size=ID_BYTES).digest()


def encode_record(record: Record, number: int) -> tuple[RecordHeader, list[tuple[int, bytes]]]:
    """Return the header, and the record's parts with their offsets; gaps between parts are zero."""
    meta = _encode_meta(record)
    tokens = record.tokens.astype("<i4").tobytes()
    keys = np.ascontiguousarray(record.pairs.keys, "<f2")
    columns = np.empty(len(record.pairs), COLUMNS)
    columns["position"], columns["key_sum"] = record.positions, knn_sum(keys)
    columns["p_lm"], columns["p_max"] = record.pairs.p_lm, record.pairs.p_max
    packed = columns.tobytes()
    sums = [crc32c(part) for part in (meta, tokens, packed)]
    sizes = (record.pairs.n_embd, len(record.tokens), len(record.pairs), len(meta))
    id_ = conversation_id(record.conversation)
    header = RecordHeader(0, id_, number, *sizes, *sums)
    header = replace(header, n_bytes=header.end)
    places = [0, HEADER_BYTES, header.tokens_at, header.columns_at, header.keys_at]
    parts = [header.pack(), meta, tokens, packed, keys.tobytes()]
    return header, list(zip(places, parts, strict=True))


def decode_meta(data: bytes) -> RecordMetadata:
    """Read a record's metadata.

    Raises:
        Unsound: The bytes are not JSON with the expected fields.
    """
    try:
        found = parse_json(data)
        messages = tuple(_messages(found["messages"]))
        title, app = _text(found["title"]), _text(found["app"])
        is_shared = found.get("shared", app == NO_APP)  # older versions did not write "shared"
        conversation = Conversation(title, app, messages, bool(is_shared))
        return RecordMetadata(conversation, _text(found["source"]), _date(found["added"]))
    except (ValueError, TypeError, LookupError, OverflowError) as error:
        raise Unsound(
            f"found meta of another form ({type(error).__name__}), expected JSON with title, app, "
            "source, added and messages"
        ) from error


def _encode_meta(record: Record) -> bytes:
    conversation = record.conversation
    messages = [{"role": m.role, "content": m.content} for m in conversation.messages]
    meta = {
        "title": conversation.title,
        "app": conversation.app,
        "source": record.source,
        "added": record.added,
        "messages": messages,
    }
    if conversation.is_shared != (conversation.app == NO_APP):
        meta["shared"] = conversation.is_shared
    return json.dumps(meta, ensure_ascii=False).encode(errors="replace")


def _messages(items: object) -> Iterator[Message]:
    if not isinstance(items, list):
        raise TypeError(items)
    for item in items:
        if item["role"] not in ("system", "user", "assistant"):
            raise ValueError(item["role"])
        yield Message(item["role"], _text(item["content"]))


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(value)
    return value


def _date(value: float) -> float:
    if not 0 <= float(value) < _MOST_SECONDS:
        raise ValueError(value)
    return float(value)


def _within(positions: npt.NDArray[np.int32], n_tokens: int) -> bool:
    return not len(positions) or bool(positions.min() >= 0 and positions.max() < n_tokens)


def _digest(packed: bytes) -> bytes:
    return hashlib.blake2b(packed, digest_size=_DIGEST_BYTES).digest()


def _up(n: int, step: int) -> int:
    return -(-n // step) * step

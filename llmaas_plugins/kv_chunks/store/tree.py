"""The known chunks as a forest, and the last chunk of each named context."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from llmaas_hooks import Tokens
from llmaas_plugins.kv_chunks.store.chunk_ids import CHUNK_TOKENS, TOKEN_BYTES, ChunkId

__all__ = ["Chunk", "ChunkTree", "PrefixMatch", "count_tokens", "names_of"]

ABSENT = -1
_SHORTENED = " (shortened)"


@dataclass(slots=True, eq=False)
class Chunk:
    """A stored chunk or a *ghost*: a lost chunk that is kept because stored chunks continue it.

    Attributes:
        id: Identity of the chunk.
        size: Bytes of the encoded payload; 0 for a ghost.
        bits: Bits per value in the payload (LLMS §3.2); 0 if the codec has no levels.
        ram: Offset in the RAM arena, or -1.
        disk: Offset in the slab's extents, or -1.
        pins: Number of transfers that use its bytes in RAM; a pinned chunk is not moved or freed.
        used: Logical time of its last use; 0 if it was not used since the store was opened.
        attention: Summed attention that its tokens received so far (LLMS, Eq 1).
        n_scores: Number of scores in that sum.
        n_indexed_scores: Value of ``n_scores`` in the index on disk.
        heads: Names of the contexts that end with this chunk.
    """

    id: ChunkId
    size: int
    bits: int = 0
    ram: int = ABSENT
    disk: int = ABSENT
    pins: int = 0
    used: int = 0
    attention: float = 0.0
    n_scores: float = 0.0
    n_indexed_scores: float = 0.0
    heads: set[str] = field(default_factory=set)

    @property
    def n_tokens(self) -> int:
        """Number of tokens in the chunk."""
        return len(self.id.tokens) // TOKEN_BYTES

    @property
    def is_ghost(self) -> bool:
        """Whether the chunk was lost, so that its tokens must be evaluated again."""
        return self.size == 0

    @property
    def is_absent(self) -> bool:
        """Whether neither tier has its bytes, because it is a ghost or was dropped."""
        return self.ram == self.disk == ABSENT


def names_of(context_id: str) -> tuple[str, str]:
    """Return the names under which a context's prompts are stored: whole ones, and shortened ones.

    A shortened prompt does not begin with the whole one, so it must not replace it. Both are
    deleted together.
    """
    return context_id, context_id + _SHORTENED


def count_tokens(chunks: Iterable[Chunk]) -> int:
    """Return the total number of tokens in chunks."""
    return sum(chunk.n_tokens for chunk in chunks)


class PrefixMatch(NamedTuple):
    """Stored chunks for a prompt.

    Attributes:
        path: Chunks from position 0 on, which may include ghosts. The last one is not a ghost, but
            may share only its first tokens with the prompt.
        n_tokens: Number of prompt tokens that they cover.
    """

    path: list[Chunk]
    n_tokens: int


class ChunkTree:
    """The chunks of all contexts as a forest, in which shared prefixes are shared nodes."""

    def __init__(self) -> None:
        """Start empty."""
        self._chunks: dict[bytes, Chunk] = {}
        self._children: dict[bytes, dict[bytes, Chunk]] = {}  # by parent key, then by tokens
        self._contexts: dict[str, Chunk] = {}

    def __len__(self) -> int:
        """Return the number of chunks."""
        return len(self._chunks)

    def __iter__(self) -> Iterator[Chunk]:
        """Iterate over all chunks."""
        return iter(self._chunks.values())

    def get(self, key: bytes) -> Chunk | None:
        """Return the chunk named ``key``, or None."""
        return self._chunks.get(key)

    def contexts(self) -> dict[str, bytes]:
        """Return the key of the last stored chunk of each named context."""
        return {name: chunk.id.key for name, chunk in self._contexts.items()}

    def heads_on_disk(self) -> dict[str, bytes]:
        """Return the key of each named context's last chunk on disk; others are left out."""
        found: dict[str, bytes] = {}
        for name, head in self._contexts.items():
            last: Chunk | None = head
            while last is not None and last.disk == ABSENT:
                last = self._chunks.get(last.id.parent)
            if last is not None:
                found[name] = last.id.key
        return found

    @property
    def n_contexts(self) -> int:
        """Number of named contexts; whole and shortened prompts of one count once."""
        return len({name.removesuffix(_SHORTENED) for name in self._contexts})

    def path_to(self, context_id: str) -> list[Chunk]:
        """Return all chunks of a named context in order; empty if it is unknown."""
        path: list[Chunk] = []
        chunk = self._contexts.get(context_id)
        while chunk is not None:
            path.append(chunk)
            chunk = self._chunks.get(chunk.id.parent)
        return path[::-1]

    def longest_path(self, context_id: str) -> list[Chunk]:
        """Return ``path_to`` of a context, of its whole or its shortened prompts."""
        return max(map(self.path_to, names_of(context_id)), key=count_tokens)

    def match(self, root: bytes, tokens: Tokens) -> PrefixMatch:
        """Return the chunks for the longest stored prefix of ``tokens``, shape ``(n,)``.

        The search compares tokens directly, so that no hash has to be computed.
        """
        data = np.ascontiguousarray(tokens, dtype="<i4").tobytes()
        step = CHUNK_TOKENS * TOKEN_BYTES
        path: list[Chunk] = []
        parent, n_bytes = root, 0
        for start in range(0, len(data), step):
            piece = data[start : start + step]
            siblings = self._children.get(parent, {})
            chunk = siblings.get(piece)
            if chunk is None:
                closest, n_common = _closest(siblings, piece)
                path += closest
                n_bytes += n_common
                break
            path.append(chunk)
            n_bytes += len(piece)
            parent = chunk.id.key
        while path and path[-1].is_ghost:
            n_bytes = (len(path) - 1) * step
            path.pop()
        return PrefixMatch(path, n_bytes // TOKEN_BYTES)

    def is_leaf(self, chunk: Chunk) -> bool:
        """Return whether no chunk continues this one."""
        return chunk.id.key not in self._children

    def add(self, chunk: Chunk) -> None:
        """Add a chunk under its parent, replacing one with the same key."""
        old = self._chunks.get(chunk.id.key)
        if old is not None:
            chunk.heads = old.heads
            self._contexts |= dict.fromkeys(old.heads, chunk)
        self._chunks[chunk.id.key] = chunk
        self._children.setdefault(chunk.id.parent, {})[chunk.id.tokens] = chunk

    def remove(self, chunk: Chunk) -> None:
        """Remove a chunk; contexts that ended with it now end with its parent."""
        del self._chunks[chunk.id.key]
        siblings = self._children[chunk.id.parent]
        del siblings[chunk.id.tokens]
        if not siblings:
            del self._children[chunk.id.parent]
        parent = self._chunks.get(chunk.id.parent)
        for name in chunk.heads:
            if parent is None:
                del self._contexts[name]
            else:
                self._contexts[name] = parent
                parent.heads.add(name)
        chunk.heads.clear()

    def remove_last_ghosts(self) -> list[Chunk]:
        """Remove ghosts that no chunk continues, and return them."""
        removed: list[Chunk] = []
        for chunk in tuple(self._chunks.values()):
            last: Chunk | None = self._chunks.get(chunk.id.key)
            while last is not None and last.is_ghost and self.is_leaf(last):
                parent = self._chunks.get(last.id.parent)
                self.remove(last)
                removed.append(last)
                last = parent
        return removed

    def set_head(self, context_id: str, key: bytes) -> Chunk | None:
        """Let a context end with chunk ``key``; return its last chunk before, if it was another."""
        chunk = self._chunks.get(key)
        old = self._contexts.get(context_id)
        if chunk is None or chunk is old:
            return None
        if old is not None:
            old.heads.discard(context_id)
        chunk.heads.add(context_id)
        self._contexts[context_id] = chunk
        return old

    def chunks_only_in(self, context_id: str) -> list[Chunk]:
        """Return the chunks, last first, that only this context needs."""
        return list(self.removable_from(self._contexts.get(context_id), but_for=context_id))

    def forget_context(self, context_id: str) -> list[Chunk]:
        """Forget a context; return the chunks, last first, that only it needed, to be removed."""
        chunk = self._contexts.pop(context_id, None)
        if chunk is None:
            return []
        chunk.heads.discard(context_id)
        return list(self.removable_from(chunk))

    def subtree(self, chunk: Chunk) -> list[Chunk]:
        """Return ``chunk`` and all chunks that continue it, parents first."""
        found = [chunk]
        for one in found:  # the list grows during the loop
            found += self._children.get(one.id.key, {}).values()
        return found

    def removable_from(self, chunk: Chunk | None, but_for: str | None = None) -> Iterator[Chunk]:
        """Yield ``chunk`` and its ancestors while at most context ``but_for`` needs them."""
        gone: Chunk | None = None
        while chunk is not None and chunk.heads <= {but_for}:
            children = self._children.get(chunk.id.key, {})
            if any(child is not gone for child in children.values()):
                return
            yield chunk
            gone, chunk = chunk, self._chunks.get(chunk.id.parent)

    def superseded_by(self, wanted: ChunkId) -> list[Chunk]:
        """Return partial chunks that ``wanted`` extends and that no context ends with."""
        return [
            chunk
            for chunk in self._children.get(wanted.parent, {}).values()
            if chunk.id.key != wanted.key
            and not chunk.heads
            and self.is_leaf(chunk)
            and wanted.tokens.startswith(chunk.id.tokens)
        ]


def _closest(siblings: Mapping[bytes, Chunk], piece: bytes) -> tuple[list[Chunk], int]:
    """Return the sibling with the longest common prefix with ``piece``, and that many bytes.

    The list is empty if no sibling shares a token.
    """
    best, n_best = list[Chunk](), 0
    better = piece[:TOKEN_BYTES]
    for tokens, chunk in siblings.items():
        if len(better) > n_best and tokens.startswith(better):
            best, n_best = [chunk], _common_bytes(tokens, piece)
            better = piece[: n_best + TOKEN_BYTES]
    return best, n_best


def _common_bytes(a: bytes, b: bytes) -> int:
    """Return the length of the common prefix in bytes, in whole tokens."""
    n = 0
    while n < min(len(a), len(b)) and a[n : n + TOKEN_BYTES] == b[n : n + TOKEN_BYTES]:
        n += TOKEN_BYTES
    return n

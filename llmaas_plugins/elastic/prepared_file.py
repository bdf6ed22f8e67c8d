"""Write and restore prepared files.

A prepared file is the model's own header with more fields, and the bytes of its tensors in another
order. Any llama.cpp can load it, and restoring it gives the model's file back byte for byte.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from llmaas_hooks import ConfigError, StoreError
from llmaas_plugins.elastic.adapter_index import content_end
from llmaas_plugins.elastic.metadata import (
    PREFIX,
    Elastic,
    Source,
    entries_of,
    order_in,
    read_elastic,
)
from llmaas_plugins.elastic.reordering import Bytes, Order, check_order, inverse_of, move_of, moved
from llmaas_plugins.elastic.units import Blocks, blocks_in
from llmaas_plugins.files.file_bytes import as_store_error, read_into, write
from llmaas_plugins.files.partial_file import replaced
from llmaas_plugins.model.gguf_header import GGUFHeader, GGUFTensor, read_header

__all__ = [
    "check_is_another",
    "prepared_order",
    "replace_metadata",
    "restore",
    "write_prepared",
    "write_reordered",
]

_CHUNK_BYTES = 16 << 20
_COUNT = struct.Struct("<Q")
_N_FIELDS_AT = 16

_Moved = Callable[[str, GGUFTensor, Bytes], Iterable[Bytes]]


def write_reordered(
    source: Path, path: Path, order: Order, *, takes_blocks_apart: bool = False
) -> Iterator[int]:
    """Write a model with only its units reordered; yield the numbers of bytes written.

    With ``takes_blocks_apart`` neurons move one by one, and ``ffn_down`` is quantized again.

    Raises:
        ConfigError: The source is no model that can be elastic, or the order is impossible.
        StoreError: The source cannot be read, or the target cannot be written.
    """
    check_is_another(source, path)
    with _Model(source) as model:
        blocks = blocks_in(model.header, source)
        if takes_blocks_apart:
            blocks = replace(blocks, granule=1)
        check_order(blocks, order)
        yield from _write(path, model.contents([], _reordered(blocks, order)))


def write_prepared(  # noqa: PLR0913 -- a file, its content, and two ways to make it
    source: Path,
    path: Path,
    elastic: Elastic,
    order: Order,
    *,
    is_ordered: bool = False,
    takes_blocks_apart: bool = False,
) -> Iterator[int]:
    """Write a prepared file, replacing one at that path; yield the numbers of bytes written.

    Args:
        source: Path of the model.
        path: Path of the prepared file.
        elastic: Metadata to write into the file; this function fills in its ``source``.
        order: New order of the model's units.
        is_ordered: Whether the source's units already have that order. The prepared file then
            cannot be restored.
        takes_blocks_apart: Whether neurons move one by one, and ``ffn_down`` is quantized again.
            The prepared file then cannot be restored.

    Raises:
        ConfigError: The source is already prepared, or the metadata is impossible.
        StoreError: The source cannot be read, or the target cannot be written.
    """
    check_is_another(source, path)
    blocks = replace(elastic.blocks, granule=1) if takes_blocks_apart else elastic.blocks
    check_order(_movable(blocks) if is_ordered else blocks, order)
    with _Model(source) as model:
        if any(key.startswith(PREFIX) for key in model.header.fields):
            raise ConfigError(
                f"{source} is already prepared. `llmaas elastic restore` restores its source."
            )
        if is_ordered or takes_blocks_apart:
            entries = entries_of(replace(elastic, source=None), order)
            how = _as_it_is if is_ordered else _reordered(blocks, order)
            yield from _write(path, model.contents(entries, how))
            return

        def entries_with(sha256: str) -> list[bytes]:
            origin = Source(sha256=sha256, n_bytes=model.header.n_bytes)
            return entries_of(replace(elastic, source=origin), order)

        def finish(fd: int) -> None:
            write(fd, model.beginning(entries_with(model.seen.hexdigest())), 0)

        reordered = _reordered(blocks, order)
        yield from _write(path, model.contents(entries_with("0" * 64), reordered), finish)


def replace_metadata(path: Path, elastic: Elastic) -> Iterator[int]:
    """Replace a prepared file's metadata, in one step at the end; yield numbers of bytes written.

    The order of units, the source and the tensors stay as they are in the file.

    Raises:
        ConfigError: The file is not prepared, or the metadata is impossible.
        StoreError: The file cannot be read or written.
    """
    with _Model(path) as model:
        before = read_elastic(path)
        if before is None:
            raise ConfigError(f"{path} is not a prepared file. Prepare it again.")
        order = order_in(model.header, _movable(before.blocks))
        entries = entries_of(replace(elastic, source=before.source), order)
        yield from _write(path, model.contents(entries, _as_it_is))


def prepared_order(path: Path) -> Order | None:
    """Return the order of a prepared file's units; None if there is no prepared file.

    Raises:
        StoreError: The file cannot be read.
    """
    try:
        elastic = read_elastic(path) if path.is_file() else None
        if elastic is not None:
            return order_in(read_header(path), _movable(elastic.blocks))
    except ConfigError:
        pass  # another file, which is replaced
    return None


def check_is_another(source: Path, path: Path) -> None:
    """Refuse to write a file over its own source.

    Raises:
        ConfigError: Both paths name the same file.
    """
    if path.exists() and path.samefile(source):
        raise ConfigError(f"{path} cannot replace the file that it is made from.")


def restore(path: Path, target: Path) -> Iterator[int]:
    """Write the file that a prepared file was made from, byte for byte; yield bytes written.

    Raises:
        ConfigError: The file is not prepared, or was quantized during preparation.
        StoreError: A file cannot be read or written, or the restored bytes differ from the
            original's.
    """
    elastic = read_elastic(path)
    if elastic is None:
        raise ConfigError(f"{path} is not a prepared file, so it cannot be restored.")
    if elastic.source is None:
        raise ConfigError(
            f"{path} was quantized when it was prepared: use the file that it was prepared from."
        )
    expected, written = elastic.source.sha256, hashlib.sha256()

    def noted(contents: Iterable[Bytes]) -> Iterator[Bytes]:
        for content in contents:
            written.update(content.data)
            yield content

    def finish(_fd: int) -> None:
        if written.hexdigest() != expected:
            raise StoreError(f"{path} is damaged: the restored bytes differ from the original's.")

    check_is_another(path, target)
    with _Model(path) as model:
        order = inverse_of(order_in(model.header, elastic.blocks))
        contents = model.contents([], _reordered(elastic.blocks, order))
        yield from _write(target, noted(contents), finish)


# -- inside --------------------------------------------------------------------------------------


class _Model:
    """Model file that is read from start to end.

    Attributes:
        header: The file's header.
        seen: Hash of the bytes read so far.
    """

    def __init__(self, path: Path) -> None:
        self.header: GGUFHeader = read_header(path)
        self.seen: Any = hashlib.sha256()
        self._path = path
        with as_store_error(f"cannot read {path}"):
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._start = self._read(0, self.header.data_at)
        except BaseException:
            os.close(self._fd)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def contents(self, entries: Sequence[bytes], reordered: _Moved) -> Iterator[Bytes]:
        """Yield the file's bytes in pieces, with these entries as the plugin's only fields.

        Adapters are left out.
        """
        yield np.frombuffer(self.beginning(entries), np.uint8)
        at = self.header.data_at
        for name, tensor in sorted(self.header.tensors.items(), key=lambda item: item[1].at):
            if tensor.at < at:
                raise ConfigError(f"{self._path} is damaged: {name} begins in another tensor.")
            end = tensor.at + tensor.n_bytes
            yield from self._plain(at, tensor.at)
            if name.startswith("blk."):
                yield from reordered(name, tensor, self._read(tensor.at, end))
            else:
                yield from self._plain(tensor.at, end)
            at = end
        yield from self._plain(at, content_end(self.header))

    def beginning(self, entries: Sequence[bytes]) -> bytes:
        """Return the file's header with these entries as the plugin's only fields."""
        header, content = self.header, self._start.tobytes()
        if any(content[header.infos_end :]):
            raise ConfigError(f"{self._path} has data between its header and its tensors.")
        fields = [
            content[first:last]
            for key, (first, last) in header.spans.items()
            if not key.startswith(PREFIX)
        ]
        counts = content[:_N_FIELDS_AT] + _COUNT.pack(len(fields) + len(entries))
        infos = content[header.infos_at : header.infos_end]
        whole = b"".join([counts, *fields, *entries, infos])
        return whole + bytes(-len(whole) % header.alignment)

    def _plain(self, at: int, end: int) -> Iterator[Bytes]:
        for first in range(at, end, _CHUNK_BYTES):
            yield self._read(first, min(first + _CHUNK_BYTES, end))

    def _read(self, at: int, end: int) -> Bytes:
        content = np.empty(end - at, np.uint8)
        with as_store_error(f"cannot read {self._path}"):
            n_read = read_into(self._fd, content.data, at)
        if n_read < content.size:
            raise StoreError(f"cannot read {self._path}: it was truncated while being read.")
        self.seen.update(content.data)
        return content


def _movable(blocks: Blocks) -> Blocks:
    """Return blocks whose units move one by one, as they may have moved before quantization."""
    return replace(blocks, group_granule=1, granule=1)


def _as_it_is(_name: str, _tensor: GGUFTensor, content: Bytes) -> Iterable[Bytes]:
    return (content,)


def _reordered(blocks: Blocks, order: Order) -> _Moved:
    def reordered(name: str, tensor: GGUFTensor, content: Bytes) -> Iterable[Bytes]:
        move = move_of(blocks, order, name, tensor)
        return (content,) if move is None else moved(content, move)

    return reordered


def _write(
    path: Path,
    contents: Iterable[Bytes],
    finish: Callable[[int], None] = lambda _fd: None,
) -> Iterator[int]:
    """Write a file completely, or leave an existing one unchanged."""
    return replaced(path, (content.data for content in contents), finish)

"""Adapters that recover part of the accuracy that a level loses (ElastiLM §3.2).

Each level has an adapter for each of ``attn_q``, ``attn_output``, ``ffn_gate``, ``ffn_up`` and
``ffn_down``. Keys and values have no adapters, so the KV cache suits every level. Adapters are kept
in the prepared file, in 8 bits, behind everything that llama.cpp reads.

The bytes of a table's adapters are the number of adapters (uint64), an entry for each (level,
matrix, layer and rank), and A and B of each adapter in that order, as ``LowRank`` stores them. The
widths of the level give the number of their blocks.
"""

from __future__ import annotations

import logging
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmaas_hooks import ConfigError, FileStamp, StoreError
from llmaas_hooks.native.low_rank import BLOCK, MAX_RANK, LowRank, blocks_dtype
from llmaas_plugins._native import crc32c
from llmaas_plugins.elastic.adapter_index import (
    FIELDS,
    AdapterTable,
    content_end,
    index_entries,
    widths_id,
)
from llmaas_plugins.elastic.metadata import Elastic, read_elastic
from llmaas_plugins.elastic.parts import COLUMNS, ROWS, LevelAdapters, extents_of
from llmaas_plugins.files.file_bytes import OPEN_FLAGS, as_store_error, read_into
from llmaas_plugins.files.partial_file import replaced
from llmaas_plugins.model.gguf_header import GGUFHeader, read_header

__all__ = ["Adapter", "read_adapters", "write_adapters"]

_Part = tuple[int, str, bytes | memoryview]
"""Rank, widths and bytes of a table's adapters."""

_log = logging.getLogger("llmaas.elastic")

_MATRICES = (*ROWS, *COLUMNS)
_CHUNK_BYTES = 16 << 20
_N_FIELDS_AT = 16
_COUNT = struct.Struct("<Q")
_ENTRY = np.dtype([("level", "<u2"), ("matrix", "<u2"), ("layer", "<u4"), ("rank", "<u4")])


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """Adapter of one weight at one level, as it is trained.

    It adds ``B[:n_rows] @ (A[:, :n_columns] @ x[:n_columns])`` to the first ``n_rows`` values of
    the weight's product. ``n_rows`` and ``n_columns`` are the part of the weight that the level
    uses. Any scale is part of B.

    Attributes:
        a: A; float32, ``(rank, n_in)``.
        b: B; float32, ``(n_out, rank)``.
    """

    a: NDArray[np.float32]
    b: NDArray[np.float32]


def write_adapters(
    path: Path,
    table: str,
    adapters: Mapping[int, Mapping[str, Adapter]],
    learned_on: FileStamp | None = None,
) -> Iterator[int]:
    """Write the adapters of all levels of a table into a prepared file, in place of older ones.

    The file is written again as a whole and then replaced; every other byte stays. Adapters of
    other tables that are damaged are left out, and the log says so.

    Args:
        path: Path of the prepared file.
        table: Name of the table of widths that the adapters were trained for.
        adapters: Adapters by the index of the level, then by the name of the weight. Level 0 is the
            whole model, which has no adapters. A level, or a weight, may have none.
        learned_on: State of the file when learning began; None for its state now.

    Yields:
        The numbers of bytes written.

    Raises:
        ConfigError: The file is not prepared or has no such table, or an adapter does not fit it.
        StoreError: The file cannot be read or written, or was changed meanwhile.
    """
    stamp = learned_on or FileStamp.at(path)
    _check_same(path, stamp)
    header, elastic = read_header(path), read_elastic(path)
    if elastic is None or table not in elastic.tables:
        what = "is not prepared" if elastic is None else f"has no table {table!r}"
        raise ConfigError(f"{path} {what}, so it cannot have adapters.")
    parts = _others(path, header, elastic, table)
    if any(adapters.values()):
        packed = _packed(elastic, table, adapters)
        rank = max(one.rank for level in packed.values() for one in level.values())
        widths = widths_id(elastic.levels, elastic.tables[table])
        parts[table] = rank, widths, _content_of(packed)
    at, tables = 0, dict[str, AdapterTable]()
    for name, (rank, widths, content) in parts.items():
        tables[name] = AdapterTable(
            at=at, n_bytes=len(content), crc32c=crc32c(content), rank=rank, widths=widths
        )
        at += len(content)
    contents = _file(path, header, tables, [one for *_, one in parts.values()])
    yield from replaced(path, contents, lambda _fd: _check_same(path, stamp))


def read_adapters(path: Path, elastic: Elastic, table: str) -> LevelAdapters:
    """Read the adapters of a table of widths; none if the file has none for it.

    Args:
        path: Path of the prepared file.
        elastic: Metadata of the file.
        table: Name of the table.

    Raises:
        ConfigError: The adapters were trained for other widths, or are damaged.
        StoreError: The file cannot be read, or lacks the adapters.
    """
    place = elastic.adapters.get(table)
    if place is None:
        return {}
    if place.widths != widths_id(elastic.levels, elastic.tables[table]):
        raise ConfigError(
            f"the adapters of {path} were trained for other widths than those of its table "
            f"{table!r}. {_REMEDY}"
        )
    content = _bytes_of(path, read_header(path), place)
    try:
        return _parsed(content, elastic, table)
    except ValueError as error:
        raise ConfigError(f"the adapters of {path} are damaged: {error}. {_REMEDY}") from error


# -- inside --------------------------------------------------------------------------------------

_REMEDY = "Train them again with `llmaas elastic recover`, or set `adapters = false`."


def _check_same(path: Path, stamp: FileStamp | None) -> None:
    if FileStamp.at(path) != stamp:
        raise StoreError(
            f"{path} was replaced or changed while its adapters were learned; they were not "
            "written. Run the same command again: it goes on from its progress."
        )


def _others(path: Path, header: GGUFHeader, elastic: Elastic, table: str) -> dict[str, _Part]:
    """Return the adapters of the other tables, except damaged ones."""
    found = dict[str, _Part]()
    for name, one in elastic.adapters.items():
        if name == table:
            continue
        try:
            found[name] = one.rank, one.widths, _bytes_of(path, header, one)
        except StoreError as error:
            _log.warning("adapters of the table %r are left out: %s", name, error)
    return found


def _bytes_of(path: Path, header: GGUFHeader, place: AdapterTable) -> memoryview:
    at = content_end(header) + place.at
    if at + place.n_bytes > header.n_bytes:
        raise StoreError(
            f"{path} lacks its adapters: it has {header.n_bytes:,} bytes, expected at least "
            f"{at + place.n_bytes:,}. {_REMEDY}"
        )
    content = _read(path, at, place.n_bytes)
    if len(content) < place.n_bytes or crc32c(content) != place.crc32c:
        raise StoreError(f"the adapters of {path} are damaged. {_REMEDY}")
    return content


def _read(path: Path, at: int, n_bytes: int) -> memoryview:
    with as_store_error(f"cannot read {path}"):
        fd = os.open(path, os.O_RDONLY | OPEN_FLAGS)
        try:
            room = memoryview(bytearray(n_bytes))
            n_read = read_into(fd, room, at)
        finally:
            os.close(fd)
    return room[:n_read]


# -- the bytes of a table ------------------------------------------------------------------------


def _shapes(elastic: Elastic, table: str) -> dict[str, list[tuple[int, int]]]:
    """Return the rows and columns of each weight in use, by weight name, then by level."""
    blocks, found = elastic.blocks, {}
    for name, extents in extents_of(blocks, elastic.tables[table]).items():
        matrix = name.split(".")[2]
        if matrix not in _MATRICES:
            continue
        is_attention, is_rows = matrix.startswith("attn"), matrix in ROWS
        n_units = blocks.n_groups * blocks.group_width if is_attention else blocks.n_ff
        widths = [n_units if extent is None else extent for extent in extents]
        found[name] = [(n, blocks.n_embd) if is_rows else (blocks.n_embd, n) for n in widths]
    return found


def _packed(
    elastic: Elastic, table: str, adapters: Mapping[int, Mapping[str, Adapter]]
) -> LevelAdapters:
    """Cut adapters to the widths of their levels, and quantize them.

    Raises:
        ConfigError: An adapter does not fit the model.
    """
    shapes = _shapes(elastic, table)
    packed = dict[int, dict[str, LowRank]]()
    for level, weights in adapters.items():
        if not 0 < level < len(elastic.levels):
            raise ConfigError(
                f"level {level} cannot have adapters: expected 1 to {len(elastic.levels) - 1}."
            )
        packed[level] = {}
        for name, one in weights.items():
            if name not in shapes:
                raise ConfigError(f"{name} cannot have adapters; only {', '.join(_MATRICES)} can.")
            packed[level][name] = _cut(name, one, shapes[name][0], shapes[name][level])
    return packed


def _cut(name: str, one: Adapter, whole: tuple[int, int], used: tuple[int, int]) -> LowRank:
    found = one.b.shape[:1] + one.a.shape[1:]
    if found != whole:
        raise ConfigError(f"an adapter of {name} has the shape {found}, expected {whole}.")
    try:
        return LowRank.of(one.a[:, : used[1]], one.b[: used[0]])
    except ValueError as error:
        raise ConfigError(f"an adapter of {name} cannot be stored: {error}.") from error


def _content_of(adapters: LevelAdapters) -> bytes:
    entries, arrays = list[tuple[int, int, int, int]](), list[bytes]()
    for level, weights in adapters.items():
        for name, one in weights.items():
            _, layer, matrix, _ = name.split(".")
            entries.append((level, _MATRICES.index(matrix), int(layer), one.rank))
            arrays += [one.a.tobytes(), one.b.tobytes()]
    return b"".join([_COUNT.pack(len(entries)), np.array(entries, _ENTRY).tobytes(), *arrays])


def _parsed(content: memoryview, elastic: Elastic, table: str) -> LevelAdapters:
    """Return the adapters in a table's bytes.

    Raises:
        ValueError: The bytes are no adapters of this table.
    """
    shapes, n_layers = _shapes(elastic, table), elastic.blocks.n_layers
    if len(content) < _COUNT.size:
        raise ValueError(f"it has {len(content)} bytes, expected {_COUNT.size} or more")
    n_entries = _COUNT.unpack_from(content)[0]
    at = _COUNT.size + n_entries * _ENTRY.itemsize
    if at > len(content):
        raise ValueError(f"it claims {n_entries:,} adapters in {len(content):,} bytes")
    adapters = dict[int, dict[str, LowRank]]()
    for level, matrix, layer, rank in np.frombuffer(
        content, _ENTRY, n_entries, _COUNT.size
    ).tolist():
        is_possible = (
            0 < level < len(elastic.levels)
            and matrix < len(_MATRICES)
            and layer < n_layers
            and 0 < rank <= MAX_RANK
        )
        name = f"blk.{layer}.{_MATRICES[matrix]}.weight" if is_possible else ""
        if not is_possible or name in adapters.setdefault(level, {}):
            raise ValueError(f"its adapter of matrix {matrix} of layer {layer} is impossible")
        n_rows, n_columns = shapes[name][level]
        a, at = _matrix(content, at, rank, n_columns)
        b, at = _matrix(content, at, rank, n_rows)
        adapters[level][name] = LowRank(rank, n_columns, n_rows, a, b)
    if at != len(content):
        raise ValueError(f"it has {len(content):,} bytes, expected {at:,}")
    return adapters


def _matrix(content: memoryview, at: int, rank: int, n: int) -> tuple[NDArray[Any], int]:
    dtype, n_blocks = blocks_dtype(rank), -(-n // BLOCK)
    end = at + n_blocks * dtype.itemsize
    if end > len(content):
        raise ValueError(f"it has {len(content):,} bytes, expected {end:,} or more")
    blocks = np.frombuffer(content, dtype, n_blocks, at)
    if not np.isfinite(blocks["scales"]).all():
        raise ValueError("a scale is not finite")
    return blocks, end


# -- the file ------------------------------------------------------------------------------------


def _file(
    path: Path,
    header: GGUFHeader,
    tables: Mapping[str, AdapterTable],
    parts: Sequence[bytes | memoryview],
) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a prepared file with these adapters."""
    start = _read(path, 0, header.infos_end)
    fields: list[bytes | memoryview] = [
        start[a:b] for key, (a, b) in header.spans.items() if key not in FIELDS
    ]
    if tables:
        fields += index_entries(header, tables)
    n_fields = _COUNT.pack(len(fields))
    beginning = b"".join([start[:_N_FIELDS_AT], n_fields, *fields, start[header.infos_at :]])
    yield beginning + bytes(-len(beginning) % header.alignment)
    end = content_end(header)
    for at in range(header.data_at, end, _CHUNK_BYTES):
        n_bytes = min(_CHUNK_BYTES, end - at)
        content = _read(path, at, n_bytes)
        if len(content) < n_bytes:
            raise StoreError(f"cannot read {path}: it was truncated while being read.")
        yield content
    yield from parts

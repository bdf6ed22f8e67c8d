"""Index of the adapters in a prepared file.

The adapters lie behind everything that llama.cpp reads. The field ``llmaas.elastic.adapters`` is
JSON; it says where they are and for which widths they were trained. A file may come from anybody,
so all values are checked.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from llmaas_hooks import ConfigError
from llmaas_hooks.native.low_rank import MAX_RANK
from llmaas_plugins.elastic.units import Widths
from llmaas_plugins.model.gguf_header import GGUFHeader, entry

__all__ = ["ADAPTERS", "AdapterTable", "adapter_tables", "content_end", "index_entry", "widths_id"]

ADAPTERS = "llmaas.elastic.adapters"
"""Field with the index."""

_Size = Annotated[int, Field(ge=0, lt=1 << 48)]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class AdapterTable(_Model):
    """Place of the adapters of one table of widths.

    Attributes:
        at: Offset of the adapters behind the file's other content.
        n_bytes: Size of the adapters of all levels.
        crc32c: Checksum of these bytes.
        rank: Largest rank of the adapters.
        widths: ``widths_id`` of the widths that they were trained for.
    """

    at: _Size
    n_bytes: _Size
    crc32c: Annotated[int, Field(ge=0, lt=1 << 32)]
    rank: Annotated[int, Field(ge=1, le=MAX_RANK)]
    widths: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class _Index(_Model):
    version: Literal[1]
    begins: _Size
    tables: dict[Annotated[str, Field(pattern="^[a-z][a-z_]{0,31}$")], AdapterTable]


def adapter_tables(header: GGUFHeader) -> Mapping[str, AdapterTable]:
    """Return the place of each table's adapters, by the table's name.

    Raises:
        ConfigError: The index is damaged.
    """
    index = _index(header)
    return {} if index is None else index.tables


def content_end(header: GGUFHeader) -> int:
    """Return where a file's content other than adapters ends.

    Raises:
        ConfigError: The index is damaged.
    """
    index = _index(header)
    return header.n_bytes if index is None else header.data_at + index.begins


def index_entry(header: GGUFHeader, tables: Mapping[str, AdapterTable]) -> bytes:
    """Return the header entry of an index of adapters that follow the file's other content."""
    begins = content_end(header) - header.data_at
    return entry(ADAPTERS, _Index(version=1, begins=begins, tables=dict(tables)).model_dump_json())


def widths_id(levels: Sequence[float], table: Sequence[Widths]) -> str:
    """Return a digest of a table's levels and widths."""
    widths = [[one.groups.tolist(), one.neurons.tolist()] for one in table]
    return hashlib.sha256(json.dumps([list(levels), widths]).encode()).hexdigest()


# -- inside --------------------------------------------------------------------------------------


def _index(header: GGUFHeader) -> _Index | None:
    if ADAPTERS not in header.fields:
        return None
    text = header.fields[ADAPTERS]
    try:
        index = _Index.model_validate_json(text if isinstance(text, str) else "")
    except ValidationError as error:
        raise ConfigError(
            f"its field {ADAPTERS!r} is damaged: {error.errors()[0]['msg']}"
        ) from None
    begin = header.data_at + index.begins
    if begin < max((one.at + one.n_bytes for one in header.tensors.values()), default=0):
        raise ConfigError("its adapters begin in another tensor")
    return index

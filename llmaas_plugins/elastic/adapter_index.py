"""Index of the adapters in a prepared file.

The adapters lie behind the file's other content. ``digest.CONTENT`` says where that ends, so that
adapters do not count for the model's identity. The field ``llmaas.elastic.adapters`` is JSON; it
says where the adapters of each table are and for which widths they were trained. A file may come
from anybody, so all values are checked.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from llmaas_hooks import ConfigError
from llmaas_hooks.native.low_rank import MAX_RANK
from llmaas_plugins.elastic.units import Widths
from llmaas_plugins.model.digest import CONTENT, UNCOUNTED, content_end
from llmaas_plugins.model.gguf_entries import entry
from llmaas_plugins.model.gguf_header import GGUFHeader
from llmaas_plugins.validation import validate_json

__all__ = [
    "FIELDS",
    "AdapterTable",
    "adapter_tables",
    "content_end",
    "index_entries",
    "widths_id",
]

_ADAPTERS = f"{UNCOUNTED}.adapters"

FIELDS = (_ADAPTERS, CONTENT)
"""Fields of a file that has adapters."""

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
    tables: dict[Annotated[str, Field(pattern="^[a-z][a-z_]{0,31}$")], AdapterTable]


def adapter_tables(header: GGUFHeader) -> Mapping[str, AdapterTable]:
    """Return the place of each table's adapters, by the table's name.

    Raises:
        ConfigError: The index is damaged.
    """
    if _ADAPTERS not in header.fields:
        return {}
    text = header.fields[_ADAPTERS]
    try:
        return validate_json(_Index, text if isinstance(text, str) else "").tables
    except ValidationError as error:
        what = error.errors()[0]["msg"]
        raise ConfigError(f"its field {_ADAPTERS!r} is damaged: {what}") from None


def index_entries(header: GGUFHeader, tables: Mapping[str, AdapterTable]) -> list[bytes]:
    """Return the header entries of adapters that follow the file's other content."""
    n_bytes = np.array([content_end(header) - header.data_at], np.uint64)
    index = _Index(version=1, tables=dict(tables)).model_dump_json()
    return [entry(_ADAPTERS, index), entry(CONTENT, n_bytes)]


def widths_id(levels: Sequence[float], table: Sequence[Widths]) -> str:
    """Return a digest of a table's levels and widths."""
    widths = [[one.groups.tolist(), one.neurons.tolist()] for one in table]
    return hashlib.sha256(json.dumps([list(levels), widths]).encode()).hexdigest()

"""Metadata of a prepared file: the widths of its levels, and how it was made.

The field ``llmaas.elastic`` is JSON. The order of units and the biases are arrays, which
llama.cpp's log and ``Llama.metadata`` leave out. A file may come from anybody, so all fields are
checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from llmaas_hooks import ConfigError
from llmaas_plugins.elastic.adapter_index import AdapterTable, adapter_tables
from llmaas_plugins.elastic.reordering import Order, check_order
from llmaas_plugins.elastic.units import Blocks, Calibration, Widths, blocks_in
from llmaas_plugins.model.digest import UNCOUNTED
from llmaas_plugins.model.gguf_entries import entry
from llmaas_plugins.model.gguf_header import GGUFHeader, read_header
from llmaas_plugins.validation import validate_json

__all__ = ["OUTPUTS", "PREFIX", "Elastic", "Source", "entries_of", "order_in", "read_elastic"]

PREFIX = UNCOUNTED
"""Prefix of all fields that preparation adds."""
OUTPUTS = ("attn_output", "ffn_down")
"""Matrices that have biases, in the order of the biases."""

_GROUPS, _NEURONS, _BIASES = f"{PREFIX}.groups", f"{PREFIX}.neurons", f"{PREFIX}.biases."
_MOST_LEVELS = 64

Ints = list[list[Annotated[int, Field(ge=0, lt=1 << 31)]]]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class _Table(_Model):
    groups: Ints
    neurons: Ints


class _Calibration(_Model):
    sha256: Annotated[str, Field(max_length=64)]
    seed: int
    n_tokens: Annotated[int, Field(ge=0)]
    method: Annotated[str, Field(max_length=64)]


class Source(_Model):
    """File that a prepared file was made from.

    Attributes:
        sha256: SHA-256 of the whole file.
        n_bytes: Size of the file.
    """

    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    n_bytes: Annotated[int, Field(gt=0)]


class _Json(_Model):
    version: Literal[1]
    levels: Annotated[list[Annotated[float, Field(gt=0, le=1)]], Field(max_length=_MOST_LEVELS)]
    step: Annotated[int, Field(gt=0, lt=1 << 31)]
    tables: dict[Annotated[str, Field(pattern="^[a-z][a-z_]{0,31}$")], _Table]
    anchors: list[int]
    calibration: _Calibration
    source: Source | None
    cuts_keys_values: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Elastic:
    """Content of a prepared file's metadata.

    Attributes:
        blocks: The model's blocks.
        levels: Shares of the blocks' bytes; descending from 1. K and V projections count only if
            levels cut them.
        step: Unit of neurons in use: their number is a multiple of ``step``, or all.
        tables: Widths by level, by the name of the method that chose them.
        anchors: Layers whose loss matters most; the uniform table keeps them whole for longest.
        calibration: How the scores were computed.
        source: File that this one was made from. None if it was quantized during preparation and
            cannot be restored.
        biases: Biases of the products of ``OUTPUTS``, by table; float16, ``(n_levels, n_layers, 2,
            n_embd)``. A table may have no biases.
        adapters: Places of the adapters in the file, by table. ``entries_of`` leaves them out.
    """

    blocks: Blocks
    levels: tuple[float, ...]
    step: int
    tables: Mapping[str, tuple[Widths, ...]]
    anchors: tuple[int, ...]
    calibration: Calibration
    source: Source | None
    biases: Mapping[str, NDArray[np.float16]]
    adapters: Mapping[str, AdapterTable] = field(default_factory=dict)

    def biases_of(self, table: str) -> dict[str, NDArray[np.float32]]:
        """Return a table's biases by the weight to whose product they are added.

        Each is float32 with shape ``(n_levels, n_embd)``.
        """
        if table not in self.biases:
            return {}
        return {
            f"blk.{layer}.{matrix}.weight": self.biases[table][:, layer, i].astype(np.float32)
            for layer in range(self.blocks.n_layers)
            for i, matrix in enumerate(OUTPUTS)
        }

    def check(self) -> Self:
        """Refuse impossible values.

        Raises:
            ConfigError: A value is impossible.
        """
        descending = all(a > b for a, b in zip(self.levels, self.levels[1:], strict=False))
        if not self.levels or self.levels[0] != 1.0 or not descending:
            raise ConfigError(f"its levels are {self.levels}, expected 1.0 and smaller ones")
        if not self.tables:
            raise ConfigError("it has no table of widths")
        for name, table in self.tables.items():
            _check_table(self, name, table)
        for name, biases in self.biases.items():
            shape = len(self.levels), self.blocks.n_layers, 2, self.blocks.n_embd
            if name not in self.tables or biases.shape != shape or not np.isfinite(biases).all():
                raise ConfigError(f"its biases of the table {name!r} are impossible")
        if not all(0 <= layer < self.blocks.n_layers for layer in self.anchors):
            raise ConfigError(
                f"its anchors are {self.anchors}, expected layers below {self.blocks.n_layers}"
            )
        return self


def read_elastic(path: Path) -> Elastic | None:
    """Read the metadata of a prepared file, or return None if the file is not prepared.

    Raises:
        ConfigError: The file is no GGUF, is damaged, or was prepared by a newer version of this
            plugin.
        StoreError: The file cannot be read.
    """
    header = read_header(path)
    if PREFIX not in header.fields:
        return None
    try:
        return _elastic(header, path).check()
    except (ConfigError, ValidationError) as error:
        raise ConfigError(
            f"{path} was prepared by another version, or is damaged: {_reason(error)}. Prepare it "
            "again from its source with `llmaas elastic prepare`."
        ) from error


def order_in(header: GGUFHeader, blocks: Blocks) -> Order:
    """Return the order of a prepared file's units.

    Raises:
        ConfigError: The order is missing or impossible.
    """
    groups = _array(header, _GROUPS, np.dtype("<u4"), (blocks.n_layers, blocks.n_groups))
    neurons = _array(header, _NEURONS, np.dtype("<u4"), (blocks.n_layers, blocks.n_ff))
    order = Order(groups, neurons)
    check_order(blocks, order)
    return order


def entries_of(elastic: Elastic, order: Order) -> list[bytes]:
    """Return the header entries of the fields that preparation adds.

    Raises:
        ConfigError: A value is impossible.
    """
    elastic.check()
    calibration = elastic.calibration
    json = _Json(
        version=1,
        levels=list(elastic.levels),
        step=elastic.step,
        tables={name: _table(widths) for name, widths in elastic.tables.items()},
        anchors=list(elastic.anchors),
        calibration=_Calibration(
            sha256=calibration.sha256,
            seed=calibration.seed,
            n_tokens=calibration.n_tokens,
            method=calibration.method,
        ),
        source=elastic.source,
        cuts_keys_values=elastic.blocks.cuts_keys_values,
    )
    fields: dict[str, str | NDArray[Any]] = {PREFIX: json.model_dump_json(exclude_defaults=True)}
    fields |= {_GROUPS: order.groups, _NEURONS: order.neurons}
    for name, biases in elastic.biases.items():
        fields[_BIASES + name] = biases.view(np.uint16)
    return [entry(key, value) for key, value in fields.items()]


# -- inside --------------------------------------------------------------------------------------


def _elastic(header: GGUFHeader, path: Path) -> Elastic:
    text = header.fields[PREFIX]
    json = validate_json(_Json, text if isinstance(text, str) else "")
    blocks = blocks_in(header, path, cuts_keys_values=json.cuts_keys_values)
    shape = len(json.levels), blocks.n_layers, 2, blocks.n_embd
    names = [key.removeprefix(_BIASES) for key in header.fields if key.startswith(_BIASES)]
    biases = {
        name: _array(header, _BIASES + name, np.dtype("<u2"), shape).view(np.float16)
        for name in names
    }
    return Elastic(
        blocks=blocks,
        levels=tuple(json.levels),
        step=json.step,
        tables={name: _widths(table, blocks) for name, table in json.tables.items()},
        anchors=tuple(json.anchors),
        calibration=Calibration(**json.calibration.model_dump()),
        source=json.source,
        biases=biases,
        adapters=adapter_tables(header),
    )


def _table(levels: tuple[Widths, ...]) -> _Table:
    return _Table(
        groups=[one.groups.tolist() for one in levels],
        neurons=[one.neurons.tolist() for one in levels],
    )


def _widths(table: _Table, blocks: Blocks) -> tuple[Widths, ...]:
    rows = [*table.groups, *table.neurons]
    if len(table.groups) != len(table.neurons) or {len(row) for row in rows} != {blocks.n_layers}:
        raise ConfigError(f"a table lacks widths of {blocks.n_layers} layers for each level")
    return tuple(
        Widths(np.array(groups, np.int32), np.array(neurons, np.int32))
        for groups, neurons in zip(table.groups, table.neurons, strict=True)
    )


def _check_table(elastic: Elastic, name: str, table: tuple[Widths, ...]) -> None:
    blocks, step = elastic.blocks, elastic.step
    if len(table) != len(elastic.levels):
        raise ConfigError(f"the table {name!r} has {len(table)} levels, not {len(elastic.levels)}")
    groups = np.stack([one.groups for one in table])
    neurons = np.stack([one.neurons for one in table])
    is_possible = (
        _are_widths(groups, blocks.n_groups, blocks.group_granule)
        and _are_widths(neurons, blocks.n_ff, step)
        and step % blocks.granule == 0
        and (groups[0] == blocks.n_groups).all()
        and (neurons[0] == blocks.n_ff).all()
    )
    if not is_possible:
        raise ConfigError(f"the table {name!r} has impossible widths")
    grows = (np.diff(groups, axis=0) > 0) | (np.diff(neurons, axis=0) > 0)
    if grows.any():
        level = int(np.argmax(grows.any(axis=1)))
        wider, narrower = elastic.levels[level : level + 2]
        raise ConfigError(
            f"the table {name!r} uses more of a layer at level {narrower} than at {wider}"
        )


def _are_widths(widths: NDArray[np.int32], n_units: int, step: int) -> bool:
    is_cut = (widths % step == 0) | (widths == n_units)
    return bool((is_cut & (widths > 0) & (widths <= n_units)).all())


def _array(
    header: GGUFHeader, key: str, dtype: np.dtype[Any], shape: tuple[int, ...]
) -> NDArray[Any]:
    value = header.fields.get(key)
    if not isinstance(value, np.ndarray) or value.dtype != dtype or value.size != np.prod(shape):
        raise ConfigError(f"its field {key!r} is not {np.prod(shape):,} values of {dtype}")
    return value.reshape(shape)


def _reason(error: ConfigError | ValidationError) -> str:
    if isinstance(error, ConfigError):
        return str(error)
    first = error.errors()[0]
    return f"{'.'.join([PREFIX, *map(str, first['loc'])])!r}: {first['msg']}"

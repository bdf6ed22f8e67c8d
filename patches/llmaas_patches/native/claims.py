"""Turn plugins' claims on weights into the weight table of a model."""

from __future__ import annotations

import os
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmaas_hooks import ConfigError, LowRank, PluginError, TensorInfo, WeightClaim
from llmaas_patches.native.library import Library

__all__ = [
    "EXTENTS",
    "HOOK",
    "Place",
    "Resolved",
    "are_extents",
    "c_extents",
    "fill_table",
    "overrides",
    "resolve",
    "split_paths",
    "tensor_places",
]

HOOK = "llmaas_weights"
_BLOCK = re.compile(r"blk\.(\d+)\.(.*)")
_MAX_LEVELS, _ALL = 64, -1
EXTENTS = f"up to {_MAX_LEVELS} extents, None or 0 or more each"


@dataclass(frozen=True, slots=True)
class Place:
    """Place of a tensor: its file, the offset of its bytes in the file, and its description."""

    path: str
    offset: int
    info: TensorInfo


@dataclass(slots=True)
class Resolved:
    """Claims on one tensor: the name of the plugin and its claim for each property."""

    source: tuple[str, WeightClaim] | None = None
    part: tuple[str, WeightClaim] | None = None

    @property
    def owner(self) -> str:
        """Plugin to name in errors about this tensor."""
        owned = self.source or self.part
        return owned[0] if owned else "unknown"

    def bare(self) -> Resolved:
        """Return the claims without their arrays, which the table has copied."""
        return Resolved(_bare(self.source), _bare(self.part))


def _bare(owned: tuple[str, WeightClaim] | None) -> tuple[str, WeightClaim] | None:
    return owned and (owned[0], replace(owned[1], biases=None, adapters=()))


def tensor_places(library: Library, paths: Iterable[str]) -> dict[str, Place]:
    """Return the place of every tensor in a model's files, by name; skip unreadable files."""
    ffi, lib = library
    places = {}
    infos, n = ffi.new("llmaas_tensor_info **"), ffi.new("uint32_t *")
    for path in paths:
        if lib.llmaas_gguf_tensors(os.fsencode(path), infos, n) != 0:
            continue  # libllama reports the problem in more detail
        for i in range(n[0]):
            info = infos[0][i]
            places[ffi.string(info.name).decode(errors="replace")] = Place(
                path, int(info.offset), _info(library, info)
            )
        lib.llmaas_gguf_tensors_free(infos[0])
    return places


def _info(library: Library, info: Any) -> TensorInfo:
    shape = (int(info.ne[0]), int(info.ne[1]), int(info.ne[2]))
    layout = int(library.lib.llmaas_repack_layout(info.type, info.ne))
    return TensorInfo(int(info.type), shape, int(info.n_bytes), layout)


def resolve(
    claims: Iterable[tuple[str, WeightClaim]], places: Mapping[str, Place]
) -> tuple[dict[str, Resolved], list[PluginError]]:
    """Return the claims on each tensor, and the errors of invalid claims, which are left out.

    Raises:
        ConfigError: Two plugins claim the same property of a tensor.
    """
    found: dict[str, Resolved] = {}
    wrong = []
    for plugin, claim in claims:
        try:
            matched = _matched(claim, places)
        except ConfigError as error:
            wrong.append(PluginError(plugin, HOOK, error))
            continue
        for name in matched:
            _claim(found.setdefault(name, Resolved()), plugin, claim, name)
    return found, wrong


def _matched(claim: WeightClaim, places: Mapping[str, Place]) -> list[str]:
    """Return the names of the tensors that a claim matches.

    Raises:
        ConfigError: The claim is invalid or matches no tensor.
    """
    if claim.rows and claim.columns:
        raise ConfigError(f"{claim.pattern!r} claims both rows and columns; claim only one of them")
    levels = claim.rows or claim.columns
    if not (levels or claim.source):
        raise ConfigError(f"{claim.pattern!r} claims nothing; expected a source, rows or columns")
    if levels and not are_extents(levels):
        raise ConfigError(f"{claim.pattern!r}: expected {EXTENTS}")
    try:
        pattern = re.compile(claim.pattern)
    except re.error as error:
        raise ConfigError(f"{claim.pattern!r} is not a regular expression: {error}") from error
    matched = [name for name in places if pattern.fullmatch(name)]
    if not matched:
        raise ConfigError(f"{claim.pattern!r} matches no tensor of the model")
    vectors = [name for name in matched if not places[name].info.is_matrix]
    if vectors:
        raise ConfigError(f"{vectors[0]} is a vector; only matrices can be claimed")
    looked_up = [name for name in matched if claim.source == "tiles" and _is_looked_up(name)]
    if looked_up:
        raise ConfigError(f"{looked_up[0]} is looked up row by row, which tiles do not support")
    for name in matched:
        _check_terms(name, places[name].info, claim)
    return matched


def _check_terms(name: str, info: TensorInfo, claim: WeightClaim) -> None:
    """Refuse biases and adapters that do not fit a tensor."""
    n_columns, n_rows, n_matrices = info.shape
    if claim.biases is not None:
        if not claim.columns or n_matrices > 1:
            raise ConfigError(f"{name} cannot have biases: expected columns of a single matrix")
        expected, found = (len(claim.columns), n_rows), claim.biases
        if found.shape != expected or found.dtype != np.float32:
            raise ConfigError(
                f"biases of {name}: expected float32 {expected}, found {found.dtype} {found.shape}"
            )
    if claim.adapters:
        n_levels = len(claim.rows or claim.columns)
        if len(claim.adapters) != n_levels or n_matrices > 1:
            raise ConfigError(
                f"{name} cannot have adapters of {len(claim.adapters)} levels: expected the "
                f"{n_levels} levels of a part of a single matrix"
            )
        for one in filter(None, claim.adapters):
            if not (one.is_sound() and one.n_columns <= n_columns and one.n_rows <= n_rows):
                raise ConfigError(
                    f"adapters of {name}: expected sound ones of at most {n_rows} rows and "
                    f"{n_columns} columns, found {one.n_rows} and {one.n_columns}"
                )


def _claim(of: Resolved, plugin: str, claim: WeightClaim, name: str) -> None:
    if claim.source:
        if of.source:
            raise _conflict("source", name, of.source[0], plugin)
        of.source = plugin, claim
    if claim.rows or claim.columns:
        if of.part:
            raise _conflict("part", name, of.part[0], plugin)
        of.part = plugin, claim


def _conflict(what: str, name: str, first: str, second: str) -> ConfigError:
    if first == second:
        return ConfigError(f"plugin {first!r} claims the {what} of {name} twice")
    return ConfigError(
        f"plugins {first!r} and {second!r} both claim the {what} of {name}; enable one of them, or "
        "configure one not to claim that weight"
    )


def fill_table(
    library: Library, table: Any, found: Mapping[str, Resolved], places: Mapping[str, Place]
) -> None:
    """Add the claims to a weight table.

    Raises:
        OSError: A file cannot be opened.
        ConfigError: A file's weights differ from the model's.
        MemoryError: There is no memory for biases or adapters.
    """
    lib = library.lib
    others: dict[str, dict[str, Place]] = {}
    for name, claimed in found.items():
        key = name.encode()
        if claimed.part:
            claim = claimed.part[1]
            extents = c_extents(library, claim.rows or claim.columns)
            lib.llmaas_weights_claim_part(table, key, int(not claim.rows), extents, len(extents))
            if claim.biases is not None:
                _claim_biases(library, table, key, claim.biases)
            if claim.adapters:
                _claim_adapters(library, table, key, claim.adapters)
        if claimed.source and claimed.source[1].source == "tiles":
            lib.llmaas_weights_claim_tiles(table, key)
        elif claimed.source:
            path, place = claimed.source[1].path, places[name]
            if path is not None and _is_multiplied(name, places):
                others[path] = others.get(path) or tensor_places(library, [path])
                place = _same(name, place, others[path].get(name), path)
            _claim_file(library, table, name, places, place)


def are_extents(extents: Sequence[int | None]) -> bool:
    """Return whether these are valid extents of a part, by level."""
    has_levels = 0 < len(extents) <= _MAX_LEVELS
    return has_levels and all(extent is None or extent >= 0 for extent in extents)


def c_extents(library: Library, extents: Sequence[int | None]) -> Any:
    """Convert extents to the engine's C array."""
    values = [_ALL if extent is None else extent for extent in extents]
    return library.ffi.new("int64_t[]", values)


def _claim_biases(library: Library, table: Any, key: bytes, biases: NDArray[np.float32]) -> None:
    ffi, lib = library
    values = ffi.from_buffer("float[]", np.ascontiguousarray(biases))
    if lib.llmaas_weights_claim_biases(table, key, values, *biases.shape) != 0:
        raise MemoryError(f"not enough memory for the biases of {key.decode()}")


def _claim_adapters(
    library: Library, table: Any, key: bytes, adapters: Sequence[LowRank | None]
) -> None:
    ffi, lib = library
    values = ffi.new("llmaas_adapter[]", len(adapters))
    arrays = []  # alive until they are copied
    for value, one in zip(values, adapters, strict=True):
        if one is not None:
            value.rank, value.n_columns, value.n_rows = one.rank, one.n_columns, one.n_rows
            arrays += [ffi.from_buffer("uint8_t[]", part) for part in (one.a, one.b)]
            value.a, value.b = arrays[-2:]
    if lib.llmaas_weights_claim_adapters(table, key, values, len(adapters)) != 0:
        raise MemoryError(f"not enough memory for the adapters of {key.decode()}")


def _claim_file(
    library: Library, table: Any, name: str, places: Mapping[str, Place], packed: Place
) -> None:
    """Claim a weight's bytes in a file.

    Products read the bytes at ``packed``, and row look-ups read the model file.
    """
    lib, key, plain = library.lib, name.encode(), places[name]
    status = 0
    if _is_multiplied(name, places):
        file = os.fsencode(packed.path), packed.offset
        status = lib.llmaas_weights_claim_file(table, key, *file, packed is not plain)
    if _is_looked_up(name):
        file = os.fsencode(plain.path), plain.offset
        status = status or lib.llmaas_weights_claim_rows(table, key, *file)
    if status != 0:
        raise OSError(f"cannot open {packed.path} to read {name} from it")


def _is_looked_up(name: str) -> bool:
    return name.startswith("token_embd.")


def _is_multiplied(name: str, names: Container[str]) -> bool:
    """Return whether products use a weight: token embeddings do only without an output matrix."""
    return not _is_looked_up(name) or "output.weight" not in names


def _same(name: str, source: Place, found: Place | None, path: str) -> Place:
    if found is None or found.info != source.info:
        what = "none" if found is None else f"type {found.info.type}, shape {found.info.shape}"
        raise ConfigError(
            f"{path} does not belong to this model: found {what} for {name}, expected type "
            f"{source.info.type}, shape {source.info.shape}"
        )
    return found


def overrides(names: Iterable[str]) -> list[str]:
    """Return patterns for ``tensor_buft_overrides`` that match exactly these names.

    There are few patterns, because llama.cpp compiles each of them for each tensor of the model.
    """
    layers: dict[str, list[str]] = {}
    patterns = []
    for name in names:
        block = _BLOCK.fullmatch(name)
        if block:
            layers.setdefault(block[2], []).append(block[1])
        else:
            patterns.append(f"^{re.escape(name)}$")
    for rest, numbers in layers.items():
        patterns.append(rf"^blk\.({'|'.join(numbers)})\.{re.escape(rest)}$")
    return patterns


def split_paths(path: str) -> list[str]:
    """Return all files of a model that is opened by the name of its first split."""
    match = re.fullmatch(r"(.*-)00001-of-(\d{5})\.gguf", path)
    if match is None:
        return [path]
    prefix, n = match[1], int(match[2])
    return [f"{prefix}{i:05}-of-{n:05}.gguf" for i in range(1, n + 1)]

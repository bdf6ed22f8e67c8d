"""Read the rows of an untrusted JSON or JSONL file.

Every error names the file and the line, what was found and what was expected.
"""

from __future__ import annotations

import codecs
import json
from typing import TYPE_CHECKING

from llmaas_hooks.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["json_rows", "named", "wrong"]

_NEWLINE = b"\n"
_MOST_LINE_BYTES = 64 << 20
_FOREIGN = {b"PK": "a zip archive", b"\xff\xfe": "UTF-16 text", b"\xfe\xff": "UTF-16 text"}


def wrong(where: str, found: str, expected: str) -> ConfigError:
    """Build an error message that begins with the place, so that editors can jump to it."""
    return ConfigError(f"{where}: found {found}, expected {expected}.")


def named(value: object) -> str:
    """Describe a JSON value for an error message, quoting little of the user's text."""
    if isinstance(value, dict):
        keys = ", ".join(repr(str(key)[:24]) for key in list(value)[:6])
        return f"an object with keys {keys}" if keys else "an empty object"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    return "null" if value is None else f"{type(value).__name__} {str(value)[:24]!r}"


def _check_file(path: Path, max_bytes: int) -> None:
    n_bytes = path.stat().st_size
    if not path.is_file():
        raise wrong(str(path), "not a regular file", "one JSON or JSONL file")
    if n_bytes > max_bytes:
        limit = f"at most {max_bytes:,}; split the file or raise max_bytes"
        raise wrong(str(path), f"{n_bytes:,} bytes", limit)
    with path.open("rb") as file:
        foreign = _FOREIGN.get(file.read(2))
    if foreign is not None:
        raise wrong(str(path), foreign, "JSON or JSONL in UTF-8; unpack or convert it first")


def json_rows(path: Path, *, max_bytes: int) -> Iterator[tuple[str, object]]:
    """Yield every row of a JSON list, a JSON object or a JSONL file.

    If the first line is a complete object, the file is read line by line as JSONL. (A document of
    one line gives the same result.) Any other file is one document and is read whole.

    Args:
        path: A regular file in UTF-8, with or without a byte order mark.
        max_bytes: Size limit; larger files are refused before they are read.

    Yields:
        The place to name in errors, and the row.

    Raises:
        ConfigError: The file is missing, empty, too large, of a foreign format or not JSON.
    """
    try:
        _check_file(path, max_bytes)
        yield from _rows(path)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"{path}: cannot read this file: {reason}.") from error


def _rows(path: Path) -> Iterator[tuple[str, object]]:
    lines = _lines(path)
    number, line = next(lines, (0, ""))
    if not line:
        raise wrong(str(path), "an empty file", "JSON or JSONL")
    first = _object(line)
    if first is None:
        yield from _document_rows(path)
        return
    yield f"{path}:{number}", first
    for number, line in lines:
        yield f"{path}:{number}", _parse(line, path, number)


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield lines with their numbers, except blank ones.

    Only a whole document may be in one very long line.
    """
    with path.open("rb") as file:
        number = 0
        while line := file.readline(_MOST_LINE_BYTES + 1):
            number += 1
            line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            if len(line) > _MOST_LINE_BYTES:
                if not line.startswith(b"{"):
                    yield number, "["  # a document in one line, which is read whole
                    return
                limit = f"at most {_MOST_LINE_BYTES >> 20} MiB for a conversation"
                raise wrong(f"{path}:{number}", "a longer line", limit)
            if text := _decoded(line, path, number).strip():
                yield number, text


def _decoded(content: bytes, path: Path, line: int) -> str:
    """Decode UTF-8 that starts at line ``line``.

    Raises:
        ConfigError: The bytes are not UTF-8, or contain a NUL byte, as UTF-16 and binary files do.
    """
    try:
        at, text = content.find(b"\0"), content.decode()
    except UnicodeDecodeError as error:
        at, text = error.start, ""
    if at >= 0:
        where = f"{path}:{line + content.count(_NEWLINE, 0, at)}"
        found = f"a byte 0x{content[at]:02x} that is not UTF-8 text"
        raise wrong(where, found, f"UTF-8; convert it, as with `iconv -f LATIN1 -t UTF-8 {path}`")
    return text


def _object(line: str) -> dict[str, object] | None:
    """Return the JSON object of a line, or None if the line is anything else."""
    try:
        value = json.loads(line) if line.startswith("{") else None
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _document_rows(path: Path) -> Iterator[tuple[str, object]]:
    text = _decoded(path.read_bytes().removeprefix(codecs.BOM_UTF8), path, 1)
    document = _parse(text, path, 1)
    if isinstance(document, dict):
        document = [document]
    if not isinstance(document, list):
        raise wrong(str(path), named(document), "a JSON object or list")
    for number, row in enumerate(document, start=1):
        yield f"{path}: row {number}", row


def _parse(text: str, path: Path, line: int) -> object:
    where, expected = f"{path}:{line}", "a JSON object or list"
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        where = f"{path}:{line + error.lineno - 1}:{error.colno}"
        raise wrong(where, f"invalid JSON ({error.msg})", expected) from None
    except RecursionError:
        raise wrong(where, "JSON nested too deeply", expected) from None
    except ValueError as error:  # an integer with thousands of digits
        raise wrong(where, f"invalid JSON ({error})", expected) from None

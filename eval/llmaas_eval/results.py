"""``python -m llmaas_eval.results``: write the tables of README.md and docs from ``eval/results``.

A page shows ``eval/results/NAME.json`` between ``<!-- result: NAME -->`` and ``<!-- /result -->``.
Cells are text, as they are shown. ``source`` is "transcribed from docs" where the measurement's own
output was not kept.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from llmaas_eval.markdown import table

__all__ = ["RESULTS", "Result", "about", "load", "main", "pages", "rewritten", "shown", "write"]

_ROOT = Path(__file__).parents[2]
RESULTS = _ROOT / "eval" / "results"

_PLACE = re.compile(r"<!-- result: ([\w-]+) -->\n.*?<!-- /result -->", re.DOTALL)


class Result(NamedTuple):
    """A measured table.

    Attributes:
        command: Command that measured it; None if it was not recorded.
        machine: Machine that ran the command; None if it was not recorded.
        versions: Versions of the packages, by name.
        source: Where the cells are from.
        align: Alignment of each column: ``l`` for text, ``r`` for numbers.
        columns: Heads of the columns.
        rows: Cells of each row.
    """

    command: str | None
    machine: str | None
    versions: dict[str, str]
    source: str
    align: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def as_markdown(self) -> str:
        """Return the table and a line that says how it was measured."""
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        command = "not recorded" if self.command is None else f"`{self.command}`"
        about = f"Command: {command}. Machine: {self.machine or 'not recorded'}. {versions}."
        return f"{table(self.columns, self.rows, self.align)}\n\n*{about}*"


def about() -> dict[str, Any]:
    """Return the running command, the machine and the versions, as results state them."""
    names = ("llama-cpp-python", "llmaas-plugins")
    return {
        "command": shlex.join(["python", *sys.orig_argv[1:]]),
        "machine": f"{os.cpu_count()} cores of {_processor()}",
        "versions": {name: version(name) for name in names},
    }


def write(path: Path, settings: dict[str, Any], rows: Sequence[Any], text: str) -> None:
    """Write a study's rows to ``path`` with ``.json``, and its tables with ``.md``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    document = about() | {"settings": settings, "rows": rows}
    path.with_suffix(".json").write_text(json.dumps(document), encoding="utf-8")
    path.with_suffix(".md").write_text(f"{text}\n", encoding="utf-8")


def load(name: str) -> Result:
    """Read a result by its name."""
    return Result(**json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8")))


def pages() -> Iterator[Path]:
    """Yield the pages that may show results."""
    yield _ROOT / "README.md"
    yield from sorted((_ROOT / "docs").rglob("*.md"))


def shown(text: str) -> list[str]:
    """Return the names of the results that a page shows."""
    return _PLACE.findall(text)


def rewritten(text: str) -> str:
    """Return a page's text with its results as they are in the files."""
    return _PLACE.sub(lambda place: _block(place[1]), text)


def main() -> int:
    """Rewrite the pages and return the exit status."""
    for page in pages():
        page.write_text(rewritten(page.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


def _processor() -> str:
    found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    return found[1] if found else platform.machine()


def _block(name: str) -> str:
    return f"<!-- result: {name} -->\n\n{load(name).as_markdown()}\n\n<!-- /result -->"


if __name__ == "__main__":
    sys.exit(main())

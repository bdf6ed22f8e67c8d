"""``python -m llmaas_eval.results``: write the tables of README.md and docs from ``eval/results``.

``python -m llmaas_eval.results keep NAME OUTPUT…`` makes ``eval/results/NAME.json`` of the JSON
that a study, a benchmark run or ``llmaas demo --json`` wrote.

A page shows ``eval/results/NAME.json`` between ``<!-- result: NAME -->`` and ``<!-- /result -->``.
Cells are text, as they are shown. ``source`` names the outputs; it is "transcribed from docs" where
the measurement's own output was not kept.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from llmaas_eval.markdown import table
from llmaas_plugins.run_record import run_record

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
        date: Days of the measurement; None if they were not recorded.
        commit: Commits of this repository that were measured; None if they were not recorded.
    """

    command: str | None
    machine: str | None
    versions: dict[str, str]
    source: str
    align: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    date: str | None = None
    commit: str | None = None

    def as_markdown(self) -> str:
        """Return the table and a line that says how it was measured."""
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        command = "not recorded" if self.command is None else f"`{self.command}`"
        about = f"Command: {command}. Machine: {self.machine or 'not recorded'}. {versions}."
        about += "" if self.date is None else f" Date: {self.date}."
        about += "" if self.commit is None else f" Commit: {self.commit}."
        return f"{table(self.columns, self.rows, self.align)}\n\n*{about}*"


def about() -> dict[str, Any]:
    """Return the record of this run, as results state it: ``run_record`` and the git commit."""
    return run_record() | {"commit": _commit()}


def write(
    path: Path,
    settings: dict[str, Any],
    rows: Sequence[Any],
    report: Callable[[dict[str, Any]], str],
) -> str:
    """Write a study's output to ``path`` with ``.json``, and the report of it with ``.md``.

    Returns:
        The report.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    document = about() | {"settings": settings, "rows": rows}
    text = report(document)
    path.with_suffix(".json").write_text(json.dumps(document), encoding="utf-8")
    path.with_suffix(".md").write_text(f"{text}\n", encoding="utf-8")
    return text


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


def main(argv: Sequence[str] | None = None) -> int:
    """Keep outputs as a result, or rewrite the pages; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m llmaas_eval.results")
    actions = parser.add_subparsers(dest="action")
    keeping = actions.add_parser("keep", help="make a table of what a study wrote")
    keeping.add_argument("name", metavar="NAME", help="name of a file in eval/results")
    keeping.add_argument("outputs", metavar="OUTPUT", type=Path, nargs="+", help="JSON file")
    args = parser.parse_args(argv)
    return _rewrite() if args.action is None else _keep(args.name, args.outputs)


def _keep(name: str, outputs: Sequence[Path]) -> int:
    from llmaas_eval.keeping import KeepError, keep  # imports all studies, which import this

    path = RESULTS / f"{name}.json"
    n_before = len(load(name).rows) if path.exists() else 0
    try:
        keep(name, outputs, path)
    except KeepError as error:
        sys.stderr.write(f"results: error: {error}\n")
        return 2
    sys.stdout.write(
        f"{path}: {len(load(name).rows)} rows, {n_before} before; `make results` writes the docs\n"
    )
    return 0


def _rewrite() -> int:
    for page in pages():
        page.write_text(rewritten(page.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


def _commit() -> str | None:
    """Return the commit of this checkout, with ``-dirty`` if files differ from it."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*", "--abbrev=10"]
    try:
        found = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False)  # noqa: S603  a constant command
    except FileNotFoundError:  # git is not installed
        return None
    return found.stdout.strip() if found.returncode == 0 else None


def _block(name: str) -> str:
    return f"<!-- result: {name} -->\n\n{load(name).as_markdown()}\n\n<!-- /result -->"


if __name__ == "__main__":
    sys.exit(main())

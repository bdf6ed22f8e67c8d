"""The study's results as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from llmaas_eval.tables import Maker, Output, Table, between
from llmaas_eval.window.study import WAYS, Row

__all__ = ["TABLES", "report"]


def report(document: Output) -> str:
    """Return a table of perplexities, and the table of ``eval/results``."""
    rows = [Row(**row) for row in document["rows"]]
    lines = [[row.name, f"{row.perplexity:.2f}", f"{row.evaluated:.2f}"] for row in rows]
    perplexity = Table(["cells", "perplexity", "evaluated per token"], lines, "lrr")
    about = f"{document['texts']} texts of {document['tokens']} tokens, window {document['window']}"
    return "\n\n".join([perplexity.as_markdown(), _windows([document]).as_markdown(), about])


def _windows(outputs: Sequence[Output]) -> Table:
    """Show each way's perplexity over the first way's, with a line for each output's window."""
    first, second, *_ = [way.name for way in WAYS]
    heads = ["window", "texts", *(_head(way.name) for way in WAYS[1:]), "evaluated per token read"]
    lines = []
    for output in sorted(outputs, key=lambda output: output["window"]):
        rows = {row["name"]: Row(**row) for row in output["rows"]}
        cells = [
            f"× {between(rows[way.name].against_first, 3)}" if way.name in rows else ""
            for way in WAYS[1:]
        ]
        evaluated = f"{rows[first].evaluated:.2f} again, {rows[second].evaluated:.2f} moved"
        lines.append([f"{output['window']:,}", str(output["texts"]), *cells, evaluated])
    return Table(heads, lines, "rrlllll")


def _head(way: str) -> str:
    return way.removesuffix(", no sinks").removeprefix("moved, ")


TABLES: Mapping[str, Maker] = {"window": _windows}

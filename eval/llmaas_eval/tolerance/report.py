"""A study's rows as JSON, as Markdown tables with paired intervals, and as a picture."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmaas_eval.tolerance.outcome import interval
from llmaas_eval.tolerance.study import Row

__all__ = ["by_arm", "curves", "quality_table", "recall_table", "task_table", "write"]

_MIXED = "all"


def by_arm(rows: Iterable[Row]) -> dict[tuple[str, float], list[Row]]:
    """Rows by arm and mean bits asked for; the same texts in the same order in each."""
    found: dict[tuple[str, float], list[Row]] = {}
    for row in rows:
        found.setdefault((row["arm"], row["mean"]), []).append(row)
    return found


def quality_table(rows: Sequence[Row]) -> str:
    """One line an arm; differences are to ``static`` at the same mean, texts in pairs."""
    arms = by_arm(rows)
    lines = [
        "| kept as | bits | stored | KL | first 8 | top-1, first 8 | perplexity | attention error |"
        " KL less static's |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for (name, mean), found in arms.items():
        cells = [
            name,
            f"{_mean(found, 'bits'):.2f}",
            f"{_mean(found, 'share'):.2%}",
            f"{1e4 * _mean(found, 'kl'):.2f}",
            f"{1e4 * _mean(found, 'kl_first'):.2f}",
            f"{_mean(found, 'top1_first'):.2%}",
            _perplexity(found),
            f"{_mean(found, 'attention_error'):.2%}",
            _difference(found, arms.get(("static", mean), found), "kl", 1e4),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", "KL in 1e-4 nats; perplexity against f16 cells."])


def task_table(rows: Sequence[Row], pairs: Sequence[tuple[tuple[str, float], ...]]) -> str:
    """KL by task of each pair of arms: the first, the second, and their difference."""
    titles = [f"{a} | {b} at {mean:g} bits | difference" for (a, mean), (b, _) in pairs]
    lines = [f"| task | {' | '.join(titles)} |", "|---" + "|---:" * 3 * len(pairs) + "|"]
    for task in [*dict.fromkeys(row["task"] for row in rows), _MIXED]:
        arms = by_arm(row for row in rows if task in {row["task"], _MIXED})
        cells = [task]
        for one, other in pairs:
            cells += [f"{1e4 * _mean(arms[arm], 'kl'):.2f}" for arm in (one, other)]
            cells.append(_difference(arms[one], arms[other], "kl", 1e4))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def recall_table(rows: Sequence[Row]) -> str:
    """Answers that are right, and nats for the right one, by arm."""
    arms = by_arm(rows)
    lines = [
        "| kept as | bits | stored | right | less f16's | less static's | nats | less static's |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for (name, mean), found in arms.items():
        static = arms.get(("static", mean), found)
        cells = [
            name,
            f"{_mean(found, 'bits'):.2f}",
            f"{_mean(found, 'share'):.2%}",
            f"{_mean(found, 'right'):.1%}",
            _difference(found, arms["f16", 16.0], "right", 100),
            _difference(found, static, "right", 100),
            f"{_mean(found, 'nats'):.2f}",
            _difference(found, static, "nats", 1),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def curves(rows: Sequence[Row], value: str) -> dict[str, tuple[list[float], list[float]]]:
    """Share of f16's bytes and the mean of ``value``, by arm."""
    found: dict[str, tuple[list[float], list[float]]] = {}
    for (name, _), points in sorted(by_arm(rows).items(), key=lambda item: item[0][1]):
        shares, values = found.setdefault(name, ([], []))
        shares.append(_mean(points, "share"))
        values.append(_mean(points, value))
    return found


def write(path: Path, settings: Mapping[str, Any], rows: Sequence[Row], markdown: str) -> None:
    """Write ``path`` with ``.json`` and ``.md``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {"settings": dict(settings), "rows": rows}
    path.with_suffix(".json").write_text(json.dumps(document), encoding="utf-8")
    path.with_suffix(".md").write_text(f"{markdown}\n", encoding="utf-8")


def _values(rows: Sequence[Row], key: str) -> NDArray[np.float64]:
    return np.array([row[key] for row in rows], np.float64)


def _mean(rows: Sequence[Row], key: str) -> float:
    return float(_values(rows, key).mean())


def _perplexity(rows: Sequence[Row]) -> str:
    found = interval(_values(rows, "surprise"))
    mean, low, high = (100 * np.expm1(part) for part in found)
    return f"{mean:+.2f} % ({low:+.2f} to {high:+.2f})"


def _difference(rows: Sequence[Row], others: Sequence[Row], key: str, scale: float) -> str:
    if rows is others:
        return ""
    mean, low, high = interval(scale * (_values(rows, key) - _values(others, key)))
    return f"{mean:+.2f} ({low:+.2f} to {high:+.2f})"

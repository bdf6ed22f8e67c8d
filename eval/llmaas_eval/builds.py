"""Compare the speed of two builds of the suite, run in turn.

    python -m llmaas_eval.builds BEFORE AFTER --rounds 6 --demo \
        --bench "bench_restore.py -k from_ram" --bench bench_inference.py

``BEFORE`` and ``AFTER`` are checkouts, each with a ``.venv`` made by ``make setup``. Every round
runs each benchmark once with each build; which build goes first alternates. A benchmark measures
against vanilla in its own process, so each figure is already a ratio: our time over vanilla's. The
report shows the median over the rounds of AFTER's ratio divided by BEFORE's, with its 95 %
interval. AFTER is slower where that is above 1. ``added_us`` (microseconds added to a call) has no
such ratio: its values are shown unchanged. ``--demo`` makes each call of the demo's trace with both
builds in turn, so that a pair is one call and its figures are seconds. Each round's figures are
printed as they arrive.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from llmaas_eval.builds_demo import Pair, demo_pairs
from llmaas_eval.markdown import table
from llmaas_eval.results import about
from llmaas_eval.stats import median_interval

__all__ = ["main"]

Costs = dict[str, float]

_ADDED = "added_us"


def main(arguments: list[str] | None = None) -> int:
    """Run the comparison and print it as a Markdown table; return the exit status."""
    options = _parser().parse_args(arguments)
    found: dict[str, list[Pair]] = defaultdict(list)
    steps = [
        (i, run) for i in range(options.rounds) for run in ["demo"] * options.demo + options.bench
    ]
    for i, run in tqdm(steps, unit="run", disable=None):
        pairs = (
            demo_pairs(options.before, options.after, i)
            if run == "demo"
            else _bench_pairs(options.before, options.after, run, i)
        )
        for figure, new in sorted(pairs.items()):
            before, after = np.median(new, axis=0)
            label = f"{run.split(' ')[0]}: {figure}"
            found[label] += new
            tqdm.write(f"round {i + 1}, {label}: {before:.4g} → {after:.4g}", file=sys.stderr)
    rows = [_row(figure, np.array(pairs)) for figure, pairs in sorted(found.items())]
    sys.stdout.write(f"{_table(rows)}\n")
    if options.json is not None:
        options.json.write_text(json.dumps(about() | {"figures": rows}, indent=1))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m llmaas_eval.builds", description=__doc__)
    parser.add_argument("before", type=Path, help="checkout of the older build (the baseline)")
    parser.add_argument("after", type=Path, help="checkout of the newer build")
    parser.add_argument("--rounds", type=int, default=6, help="pairs of runs (default 6)")
    parser.add_argument("--demo", action="store_true", help="compare `llmaas demo` as well")
    parser.add_argument(
        "--bench", action="append", default=[], help="file in eval/bench, with pytest options"
    )
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    return parser


def _bench_pairs(before: Path, after: Path, bench: str, i: int) -> dict[str, list[Pair]]:
    """Run one benchmark file with both builds; round ``i`` decides which goes first."""
    builds = (before, after) if i % 2 else (after, before)
    costs = {build: _bench(build, bench) for build in builds}
    shared = costs[before].keys() & costs[after].keys()
    return {figure: [(costs[before][figure], costs[after][figure])] for figure in shared}


def _bench(build: Path, bench: str) -> Costs:
    """Run one benchmark file with one build; return costs by benchmark and figure."""
    file, *options = shlex.split(bench)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "benchmarks.json"
        settings = ("-o", "python_files=bench_*.py", "-o", "python_functions=bench_*")
        python = str(build / ".venv" / "bin" / "python")
        command = [python, "-m", "pytest", f"eval/bench/{file}", *options, *settings]
        _run(build, [*command, "--benchmark-only", "-q", f"--benchmark-json={out}"])
        benchmarks = json.loads(out.read_text())["benchmarks"]
    return {
        f"{one['name']} {figure}": cost
        for one in benchmarks
        for figure, cost in _costs(one["extra_info"]).items()
    }


def _costs(figures: dict[str, Any]) -> Costs:
    """Return speed-ups over vanilla as time ratios, and added microseconds unchanged."""
    costs = {
        name.removesuffix("speedup").replace("_speed", " ") + "time over vanilla": 1 / value
        for name, value in figures.items()
        if name == "speedup" or name.endswith("_speed")
    }
    return costs | ({_ADDED: figures[_ADDED]} if _ADDED in figures else {})


def _run(build: Path, command: list[str]) -> None:
    done = subprocess.run(  # noqa: S603  runs the builds named on the command line
        command,
        cwd=build,
        env=os.environ | {"GGML_NO_BACKTRACE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise SystemExit(f"{shlex.join(command)} failed:\n{done.stdout}\n{done.stderr}")


def _row(figure: str, pairs: Any) -> dict[str, Any]:
    """Compare pairs of costs, shape ``(n_pairs, 2)``; columns are before and after."""
    before, after = np.median(pairs, axis=0)
    row = {"figure": figure, "before": before, "after": after, "pairs": pairs.tolist()}
    if figure.endswith(_ADDED):
        return row
    ratio, low, high = median_interval(pairs[:, 1] / pairs[:, 0])
    return row | {"ratio": ratio, "low": low, "high": high}


def _table(rows: list[dict[str, Any]]) -> str:
    lines = []
    for row in rows:
        ratio = f"{row['ratio']:.3f} ({row['low']:.3f}–{row['high']:.3f})" if "low" in row else ""
        lines.append([row["figure"], f"{row['before']:.4g}", f"{row['after']:.4g}", ratio])
    return table(["figure", "before", "after", "after / before"], lines)


if __name__ == "__main__":
    raise SystemExit(main())

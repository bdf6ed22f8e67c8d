"""Table of ``bench_together``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from llmaas_eval.benchmarks import figures
from llmaas_eval.tables import Maker, Output, Table, between, bold, number, parse_interval

__all__ = ["TABLES"]

_WEIGHTS = {"memory": "in memory", "streamed": "streamed, {kept:.0%} of them kept"}


def _together(outputs: Sequence[Output]) -> Table:
    """Show the speed of four contexts that are decoded together and one after another."""
    lines = []
    for (weights,), info in figures(
        outputs, "bench_together::bench_four_contexts", "weights"
    ).items():
        rates = [
            number(1000 * info["n_tokens"] / parse_interval(info[name])[0])
            for name in ("vanilla_ms", "ours_ms")
        ]
        speedup = info["speedup"], info["speedup_low"], info["speedup_high"]
        label = _WEIGHTS[weights].format_map(info)
        lines.append([label, *rates, bold(between(speedup, 2, "×")), f"{info['a_batch']:.1f}"])
    heads = ["weights", "one by one, tokens/s", "together", "speed-up", "tokens a batch"]
    return Table(heads, lines, "lrrrr")


TABLES: Mapping[str, Maker] = {"service-together": _together}

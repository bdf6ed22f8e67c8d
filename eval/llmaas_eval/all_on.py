"""Gain of each plugin alone, and while all others are on: ``python -m llmaas_eval.all_on``.

The comparisons are those of ``llmaas tune``: the same requests on stock llama.cpp and with plugins,
in turn, each side in a process of its own. Each is made twice: with the plugin alone, and with all
plugins of the configuration that ``llmaas setup`` wrote.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llmaas_eval.tables import Maker, Output, Table, between, only, spread
from llmaas_plugins.cli.given_text import packaged_conversations
from llmaas_plugins.cli.tune.bench import Bench, Engine
from llmaas_plugins.cli.tune.datastore import measure_datastore
from llmaas_plugins.cli.tune.figures import Case, Figures
from llmaas_plugins.cli.tune.levels import measure_levels
from llmaas_plugins.cli.tune.restores import measure_restores
from llmaas_plugins.cli.tune.streaming import measure_streaming
from llmaas_plugins.config import Config, load_config
from llmaas_plugins.model.made_files import file_in_place_of
from llmaas_plugins.run_record import run_record

__all__ = ["TABLES", "main"]

_KV = "kv_chunks"
_MEASURES: Mapping[str, Callable[[Bench], Figures]] = {
    _KV: measure_restores,
    "elastic": measure_levels,
    "flash_weights": measure_streaming,
    "knn_lm": lambda bench: measure_datastore(bench, ()),
}


@dataclass(frozen=True, slots=True)
class _Beside(Bench):
    """A bench whose engines have other plugins, too.

    Attributes:
        others: Names of these plugins.
    """

    others: tuple[str, ...] = ()

    @contextmanager
    def with_plugins(self, *names: str, **changed: object) -> Iterator[Engine]:
        """Open the file that apps load with these plugins and the others."""
        beside = [name for name in self.others if name not in names]
        with Bench.with_plugins(self, *names, *beside, **changed) as engine:
            yield engine


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the plugins of a configuration alone and together, and print a table."""
    parser = argparse.ArgumentParser("python -m llmaas_eval.all_on", description=__doc__)
    add = parser.add_argument
    add("model", type=Path, help="model for which `llmaas setup` wrote the configuration")
    add("--config", type=Path, default=Path("llmaas.toml"), help="that file (default %(default)s)")
    add("--minutes", type=float, default=2.0, help="minutes of each part (default %(default)g)")
    add("--json", type=Path, metavar="FILE", help="write the figures to a file")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        rows = list(_rows(args, _apart(load_config(args.config, {}), Path(folder))))
    document = {"run": run_record(), "rows": rows}
    sys.stdout.write(f"{_table([document]).as_markdown()}\n")
    if args.json is not None:
        args.json.write_text(json.dumps(document, indent=1), encoding="utf-8")
    return 0


# -- inside --------------------------------------------------------------------------------------


def _apart(config: Config, folder: Path) -> Config:
    """Return a configuration whose contexts are not those of the user's apps."""
    if _KV not in config.plugins:
        return config
    kv = config.plugins[_KV]
    apart = replace(kv, values={**kv.values, "store": str(folder / "kv")})
    return replace(config, plugins={**config.plugins, _KV: apart})


def _rows(args: argparse.Namespace, config: Config) -> Iterator[dict[str, Any]]:
    """Yield the figures of each comparison, with the plugin alone and with all."""
    model = args.model.absolute()
    made = file_in_place_of(model, config.models, f"`llmaas setup {args.model}`")
    texts = tuple(text.encode() for text in packaged_conversations())
    names = tuple(name for name, table in config.plugins.items() if table.enabled)
    for part in filter(names.__contains__, _MEASURES):
        found = {}
        for side, others in (("alone", ()), ("all", names)):
            sys.stderr.write(f"{part}, {side}\n")
            bench = _Beside(model, made, config, texts, 60 * args.minutes, others=others)
            found[side] = _MEASURES[part](bench)
        for alone, together in zip(found["alone"].cases, found["all"].cases, strict=True):
            cases = {"alone": _plain(alone), "all": _plain(together)}
            yield {"plugin": part, "case": alone.name, **cases}


def _plain(case: Case) -> dict[str, Any]:
    return case.model_dump(mode="json")


def _table(outputs: Sequence[Output]) -> Table:
    """Show speeds and losses, relative to stock llama.cpp."""
    heads = ["plugin", "comparison", "figure", "alone", "all on"]
    rows = []
    for row in only(outputs)["rows"]:
        sides = row["alone"], row["all"]
        shown = {
            "perplexity": [spread([100 * math.expm1(x) for x in one["loss_change"]], 1, " %")
                           for one in sides],
        }  # fmt: skip
        speed = "first_speed" if row["plugin"] == _KV else "token_speed"
        name = "first token" if speed == "first_speed" else "further tokens"
        if all(one[speed] is not None for one in sides):
            shown[f"speed of {name}"] = [between(one[speed], 2, "×") for one in sides]
        rows += [[row["plugin"], row["case"], figure, *cells] for figure, cells in shown.items()]
    return Table(heads, rows, "lllrr")


TABLES: Mapping[str, Maker] = {"all-on": _table}
"""Functions that make the tables."""

if __name__ == "__main__":
    sys.exit(main())

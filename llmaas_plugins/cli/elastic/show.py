"""``llmaas elastic show``: contents of a prepared file."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from llmaas_hooks import ConfigError
from llmaas_plugins.cli.models import add_model_action
from llmaas_plugins.cli.output import print_report, printable

if TYPE_CHECKING:
    from llmaas_plugins.elastic.metadata import Elastic
    from llmaas_plugins.elastic.units import Widths

__all__ = ["add_show"]

_WHOLE = "whole at every level, and not counted in shares"
_CUT = (
    "cut with their groups; a wider level reads zeros in cells of a narrower one, and is less "
    "accurate there"
)


def add_show(actions: Any) -> None:
    """Register ``show``."""
    parser = add_model_action(
        actions,
        "show",
        show,
        "print the levels of a prepared model",
        "Print a prepared model's levels: the share of the blocks' bytes that each level uses, "
        "without and with key and value projections, and its groups and neurons in each layer.",
        is_prepared=True,
        is_loaded=True,
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def show(args: argparse.Namespace) -> int:
    """Print a prepared file's levels."""
    from llmaas_plugins.elastic.metadata import read_elastic

    elastic = read_elastic(args.model)
    if elastic is None:
        raise ConfigError(
            f"{args.model} is not prepared; `llmaas elastic prepare {args.model}` writes a "
            "prepared copy."
        )
    print_report(args, _report(elastic), _lines(elastic))
    return 0


def _report(elastic: Elastic) -> dict[str, Any]:
    blocks, calibration = elastic.blocks, elastic.calibration
    return {
        "arch": blocks.arch,
        "n_layers": blocks.n_layers,
        "n_groups": blocks.n_groups,
        "heads_per_group": blocks.heads_per_group,
        "n_ff": blocks.n_ff,
        "step": elastic.step,
        "cuts_keys_values": blocks.cuts_keys_values,
        "anchors": list(elastic.anchors),
        "calibration": {
            "method": calibration.method,
            "n_tokens": calibration.n_tokens,
            "seed": calibration.seed,
            "sha256": calibration.sha256,
        },
        "source": None if elastic.source is None else elastic.source.model_dump(),
        "tables": {
            name: {
                "compensated": name in elastic.biases,
                "adapters": _adapters(elastic, name),
                "levels": [
                    {
                        "level": level,
                        "share": blocks.share(widths),
                        "computed_share": blocks.computed_share(blocks.share(widths)),
                        "groups": widths.groups.tolist(),
                        "neurons": widths.neurons.tolist(),
                    }
                    for level, widths in zip(elastic.levels, table, strict=True)
                ],
            }
            for name, table in elastic.tables.items()
        },
    }


def _lines(elastic: Elastic) -> Iterator[str]:
    blocks, calibration = elastic.blocks, elastic.calibration
    yield (
        f"{blocks.arch}: {blocks.n_layers} layers of {blocks.n_groups} groups of "
        f"{blocks.heads_per_group} query heads, and of {blocks.n_ff:,} neurons"
    )
    yield f"scores by {printable(calibration.method)} on {calibration.n_tokens:,} tokens"
    yield f"anchor layers: {', '.join(map(str, elastic.anchors)) or 'none'}"
    yield f"can be restored: {'no, it was quantized' if elastic.source is None else 'yes'}"
    yield f"keys and values: {_CUT if blocks.cuts_keys_values else _WHOLE}"
    for name, table in elastic.tables.items():
        yield ""
        yield f"{name}{', compensated' if name in elastic.biases else ''}{_adapted(elastic, name)}"
        yield "level   share   with K, V   groups in each layer; neurons in each layer"
        for level, widths in zip(elastic.levels, table, strict=True):
            share = blocks.share(widths)
            shares = f"{share:6.3f}   {blocks.computed_share(share):9.3f}"
            yield f"{level:5.1f}  {shares}   {_widths(widths)}"


def _adapters(elastic: Elastic, table: str) -> dict[str, int] | None:
    found = elastic.adapters.get(table)
    return {"rank": found.rank, "bytes": found.n_bytes} if found else None


def _adapted(elastic: Elastic, table: str) -> str:
    found = elastic.adapters.get(table)
    return f", adapters of rank {found.rank} ({found.n_bytes / 1e6:,.1f} MB)" if found else ""


def _widths(widths: Widths) -> str:
    return f"{' '.join(map(str, widths.groups))}; {' '.join(map(str, widths.neurons))}"

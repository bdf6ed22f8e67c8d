"""Search of widths and biases in ``llmaas elastic prepare``, by evaluating the model."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from llmaas_plugins.cli.elastic.score import calibration_text
from llmaas_plugins.cli.models import evaluator_of
from llmaas_plugins.cli.output import progress_bar

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from llmaas_hooks import Tokens
    from llmaas_plugins.elastic.metadata import Elastic
    from llmaas_plugins.elastic.units import Widths

__all__ = ["Text", "tried"]

_N_TOKENS = 1024
"""Most tokens on which widths are evaluated."""
_N_STEPS = 12
"""Number of steps into which a layer's neurons are divided."""


class Text(NamedTuple):
    """Text on which widths are evaluated.

    Attributes:
        tokens: Tokens of the text.
        n_tokens: Most tokens to use.
    """

    tokens: Tokens
    n_tokens: int

    def halves(self) -> tuple[Text, Text]:
        """Split the text into one half for fitting and one for checking the fit."""
        middle = len(self.tokens) // 2
        first, second = self.tokens[:middle], self.tokens[middle:]
        return Text(first, self.n_tokens), Text(second, self.n_tokens)


def tried(args: argparse.Namespace, model: Path, elastic: Elastic) -> Elastic:
    """Add searched widths and fitted biases to a prepared file's metadata, if requested.

    Args:
        args: Arguments of the command.
        model: Model whose units are in order.
        elastic: Metadata of the file so far.
    """
    if not (args.is_searched or args.compensate):
        return elastic
    text = _text(args, model)
    if args.is_searched:
        print(
            f"searching each layer's widths evaluates {text.n_tokens:,} tokens several hundred "
            "times; --no-search leaves that out.",
            flush=True,
        )
        tables = {**elastic.tables, "searched": _searched(model, elastic, text)}
        elastic = replace(elastic, tables=tables)
    if args.compensate:
        elastic = replace(elastic, biases=_biases(model, elastic, text))
    return elastic


# -- internals -----------------------------------------------------------------------------------


def _text(args: argparse.Namespace, model: Path) -> Text:
    """Return the text on which to evaluate widths."""
    n_tokens = min(args.tokens or _N_TOKENS, _N_TOKENS)
    with evaluator_of(model) as (opened, evaluator):
        return Text(calibration_text(args.text, opened, evaluator, n_tokens), n_tokens)


def _searched(model: Path, elastic: Elastic, text: Text) -> tuple[Widths, ...]:
    """Search the widths of each level."""
    from llmaas_plugins.elastic.probing import Divergence, Prober, unit_times
    from llmaas_plugins.elastic.searching import search

    blocks, prober = elastic.blocks, Prober(elastic.blocks)
    step = -(-blocks.n_ff // _N_STEPS // elastic.step) * elastic.step
    with (
        evaluator_of(model, prober=prober) as (_, evaluator),
        progress_bar("widths", "%", 100) as bar,
    ):
        divergence = Divergence(evaluator, *text)

        def loss(widths: Widths) -> float:
            prober.set(widths)
            return divergence.measure()

        found = search(
            blocks,
            elastic.levels,
            loss,
            unit_times(prober, evaluator, blocks, text.tokens),
            step=step,
            least=elastic.step,
            progress=lambda left: bar.update(int(100 * (1 - left)) - bar.n),
        )
    return tuple(found)


def _biases(model: Path, elastic: Elastic, text: Text) -> Mapping[str, NDArray[np.float16]]:
    """Fit biases for each table, zero for levels whose predictions they do not improve."""
    from llmaas_plugins.elastic.compensation import biases_of
    from llmaas_plugins.elastic.fluctuation import Watcher

    blocks, found = elastic.blocks, {}
    fitted, other = text.halves()
    watcher = Watcher(blocks)
    with evaluator_of(model, watcher=watcher) as (_, evaluator):
        moments = watcher.moments(evaluator, *fitted)
    for name, table in elastic.tables.items():
        with progress_bar(f"biases, {name}", "matrix", 2 * blocks.n_layers) as bar:
            biases = biases_of(model, blocks, table, moments, bar.update)
        without = _divergences(model, elastic, name, other)
        with_them = _divergences(model, replace(elastic, biases={name: biases}), name, other)
        is_better = with_them < without
        biases[~is_better] = 0
        print(f"biases of {name}: kept for {is_better.sum()} of {len(table)} levels.")
        if is_better.any():
            found[name] = biases
    return found


def _divergences(model: Path, elastic: Elastic, table: str, text: Text) -> NDArray[np.float64]:
    """Return each level's divergence from the predictions of the whole model."""
    import numpy as np

    from llmaas_plugins.elastic.probing import Divergence, Prober

    prober = Prober(elastic.blocks, elastic.tables[table], elastic.biases_of(table))
    with evaluator_of(model, prober=prober) as (_, evaluator):
        prober.set_level(-1)
        divergence, found = Divergence(evaluator, *text), []
        for level in range(len(elastic.levels)):
            prober.set_level(level)
            found.append(divergence.measure())
    return np.array(found)

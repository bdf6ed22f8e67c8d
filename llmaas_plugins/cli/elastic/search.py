"""Search of widths and biases in ``llmaas elastic prepare``, by evaluating the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from llmaas_plugins.cli.models import evaluator_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llmaas_hooks import Tokens
    from llmaas_plugins.cli.elastic.score import Bar
    from llmaas_plugins.cli.elastic.text import Text
    from llmaas_plugins.elastic.calibration import Parts
    from llmaas_plugins.elastic.checkpoint import Checkpoint
    from llmaas_plugins.elastic.metadata import Elastic
    from llmaas_plugins.elastic.probing import TextLoss
    from llmaas_plugins.elastic.units import Blocks, Widths
    from llmaas_plugins.model.forward import Evaluator

__all__ = ["FIT", "SEARCH", "fitted", "n_search_tokens", "searched"]

SEARCH, FIT = "search widths", "fit biases"
"""Names of steps."""

_LEAST_TOKENS, _MOST_TOKENS = 384, 1024
_MOST_PRODUCTS = 4.2e11
"""Multiplications of an evaluation at most, which limits its tokens for a large model."""
_N_WINDOWS, _LEAST_LENGTH = 16, 64


def n_search_tokens(blocks: Blocks, n_tokens: int) -> int:
    """Return on how many tokens each candidate of the search is evaluated, at most."""
    n_heads = blocks.n_groups * blocks.group_width
    n_weights = blocks.n_layers * blocks.n_embd * (3 * blocks.n_ff + 2 * n_heads)
    return min(n_tokens, max(_LEAST_TOKENS, min(_MOST_TOKENS, int(_MOST_PRODUCTS / n_weights))))


def searched(  # noqa: PLR0913, PLR0917 -- a model, its text, and where progress is kept and shown
    model: Path, elastic: Elastic, text: Text, n_tokens: int, checkpoint: Checkpoint, bar: Bar
) -> Elastic:
    """Add the table ``searched`` to a prepared file's metadata.

    Args:
        model: The prepared file.
        elastic: Its metadata.
        text: Calibration text.
        n_tokens: Most tokens on which widths are searched, and most on which they are judged.
        checkpoint: Where losses are kept.
        bar: Progress bar of the step.
    """
    from llmaas_plugins.elastic.probing import Prober
    from llmaas_plugins.elastic.searching import Search, not_worse

    blocks, prober = elastic.blocks, Prober(elastic.blocks)
    with (
        evaluator_of(model, prober=prober) as (_, evaluator),
        bar(SEARCH, "%", 100) as shown,
    ):
        losses = _losses(evaluator, text, n_tokens)
        known = _Known(checkpoint)

        def loss_on(part: int) -> Callable[[Widths], float]:
            def loss(widths: Widths) -> float:
                prober.set(widths)
                return sum(each.measure() for each in losses[part])

            return known.first(loss)

        search = Search(
            blocks,
            loss_on(0),
            least=elastic.step,
            progress=lambda share: shown.update(int(100 * share) - shown.n),
        )
        found = not_worse(search, elastic.levels, elastic.tables["uniform"], loss_on(1))
    return replace(elastic, tables={**elastic.tables, "searched": tuple(found)})


def fitted(model: Path, elastic: Elastic, text: Text, n_tokens: int, bar: Bar) -> Elastic:
    """Add biases to a prepared file's metadata, none for levels that they do not improve."""
    from llmaas_plugins.elastic.compensation import biases_of
    from llmaas_plugins.elastic.fluctuation import Watcher

    blocks = elastic.blocks
    found: dict[str, NDArray[np.float16]] = {}
    watcher = Watcher(blocks)
    with evaluator_of(model, watcher=watcher) as (_, evaluator):
        own, others = _parts(evaluator, text, n_tokens)
        moments = watcher.moments(evaluator, [*own.search, *others.search])
    windows = [*own.judge, *others.judge]
    with bar(FIT, "matrix", 2 * blocks.n_layers * len(elastic.tables)) as shown:
        for name, table in elastic.tables.items():
            biases = biases_of(model, blocks, table, moments, shown.update)
            without = _divergences(model, elastic, name, windows)
            with_them = _divergences(model, replace(elastic, biases={name: biases}), name, windows)
            is_better = with_them < without
            biases[~is_better] = 0
            if is_better.any():
                found[name] = biases
    return replace(elastic, biases=found)


# -- internals -----------------------------------------------------------------------------------


class _Texts(NamedTuple):
    """Windows of text.

    Attributes:
        own: Text that the model wrote.
        others: Other text, each in turn.
    """

    own: Parts
    others: Parts


def _parts(evaluator: Evaluator, text: Text, n_tokens: int) -> _Texts:
    """Return as much text of the model's own as other text."""
    from llmaas_plugins.elastic.calibration import Parts, parts_of

    length = max(n_tokens // _N_WINDOWS, _LEAST_LENGTH)
    others = [evaluator.cut(tokens, length) for tokens in text.others.values()]
    if not len(text.own):
        return _Texts(Parts((), ()), parts_of(others, n_tokens))
    own = parts_of([evaluator.cut(text.own, length)], n_tokens // 2)
    return _Texts(own, parts_of(others, n_tokens // 2))


def _losses(evaluator: Evaluator, text: Text, n_tokens: int) -> tuple[list[TextLoss], ...]:
    """Return the losses to search with, and those to judge with.

    The model's own next tokens say nothing about its quality, so they do not count.
    """
    from llmaas_plugins.elastic.probing import NEXT_TOKEN_SHARE, TextLoss

    own, others = _parts(evaluator, text, n_tokens)
    return tuple(
        [TextLoss(evaluator, windows, share) for windows, share in parts if windows]
        for parts in (
            ((own.search, 0.0), (others.search, NEXT_TOKEN_SHARE)),
            ((own.judge, 0.0), (others.judge, NEXT_TOKEN_SHARE)),
        )
    )


class _Known:
    """Losses in the order in which a search asks for them, some of them from an earlier run.

    The search depends on nothing else, so it takes the same steps again, without evaluating.
    """

    _NAME = "losses"

    def __init__(self, checkpoint: Checkpoint) -> None:
        kept = checkpoint.get(self._NAME)
        self._checkpoint, self._losses = checkpoint, [] if kept is None else kept.tolist()
        self._n_asked = 0

    def first(self, loss: Callable[[Widths], float]) -> Callable[[Widths], float]:
        """Return a function that evaluates ``loss`` only if the next loss is not known."""

        def found(widths: Widths) -> float:
            if self._n_asked == len(self._losses):
                self._losses.append(loss(widths))
                self._checkpoint.keep({self._NAME: np.array(self._losses)})
            self._n_asked += 1
            return float(self._losses[self._n_asked - 1])

        return found


def _divergences(
    model: Path, elastic: Elastic, table: str, windows: list[Tokens]
) -> NDArray[np.float64]:
    """Return each level's divergence from the predictions of the whole model."""
    from llmaas_plugins.elastic.probing import Prober, TextLoss

    prober = Prober(elastic.blocks, elastic.tables[table], elastic.biases_of(table))
    with evaluator_of(model, prober=prober) as (_, evaluator):
        prober.set_level(-1)
        loss, found = TextLoss(evaluator, windows, 0.0), []
        for level in range(len(elastic.levels)):
            prober.set_level(level)
            found.append(loss.measure())
    return np.array(found)

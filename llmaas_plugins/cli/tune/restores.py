"""``kv_chunks``: coming back to a context after others, against evaluating it again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from llmaas_plugins.cli.files import TUNE_PREFIX
from llmaas_plugins.cli.tune.bench import LEAST_ROUNDS, Bench, Engine, in_turn
from llmaas_plugins.cli.tune.figures import Case, Figures, case_of, figures_of
from llmaas_plugins.cli.tune.worker import Led, State
from llmaas_plugins.config import PluginTable, validated
from llmaas_plugins.demo.page_cache import drop_pages
from llmaas_plugins.files.temporary_folder import locked_folder
from llmaas_plugins.kv_chunks.config import KVChunksConfig

__all__ = ["measure_restores", "own_folder"]

_NAME = "kv_chunks"
_N_CONTEXTS = 6
_LENGTHS = ((768, 16), (512, 16), (256, 8), (128, 8), (64, 8))
"""Tokens of a context with a question, and of the answer."""
_ASKED = 16
"""Tokens of a question; a chunk has as many."""
_COST = 4.0
"""Times that each context is evaluated: to be stored, and twice by vanilla; some are compared."""


class _Context(NamedTuple):
    """A context, and two ways in which it goes on.

    Attributes:
        stored: Prompt after which the context is left.
        first: Prompt with which it goes on from RAM.
        second: Prompt with which it goes on from disk.
        answer: Answer to both.
    """

    stored: list[int]
    first: list[int]
    second: list[int]
    answer: list[int]


def measure_restores(bench: Bench) -> Figures:
    """Compare restored contexts with evaluated ones, and lossless text with vanilla's."""
    with bench.vanilla() as vanilla, own_folder(bench) as store:
        contexts = _contexts(bench, vanilla)
        broken = [*_lossless(bench, vanilla, contexts, store / "lossless")]
        with bench.with_plugins(_NAME, store=str(store / "kv")) as engine:
            for context in contexts:
                engine.follow(Led(context.stored, context.answer[:1], is_new=False))
            cases = [_case("from RAM", vanilla, engine, [(c.first, c.answer) for c in contexts])]
            state = engine.state()
        for path in (store / "kv").rglob("*"):
            if path.is_file():
                drop_pages(path)
        if _settings(bench).disk_budget:
            with bench.with_plugins(_NAME, store=str(store / "kv")) as engine:
                asked = [(c.second, c.answer) for c in contexts]
                cases.append(_case("from disk", vanilla, engine, asked))
        return figures_of(
            _NAME, cases, state, vanilla.state(), broken=broken, unserved=_unserved(state)
        )


@contextmanager
def own_folder(bench: Bench) -> Iterator[Path]:
    """Make a folder on the disk of the configured store, which the store itself never sees."""
    parent = _settings(bench).store.expanduser().parent
    parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with locked_folder(parent, TUNE_PREFIX) as folder:
        yield folder


# -- inside --------------------------------------------------------------------------------------


def _contexts(bench: Bench, vanilla: Engine) -> list[_Context]:
    """Return contexts of whole chunks, with questions that follow them."""
    lengths = bench.lengths(vanilla, _COST * _N_CONTEXTS / LEAST_ROUNDS, _LENGTHS)
    n_stored = lengths.n_prompt - _ASKED
    found = []
    for piece in bench.pieces(vanilla, lengths, _N_CONTEXTS):
        stored, asked = piece.prompt[:n_stored], piece.prompt[n_stored:]
        found.append(_Context(stored, stored + asked, stored + asked[::-1], piece.answer))
    return found


def _case(
    name: str, vanilla: Engine, engine: Engine, asked: Sequence[tuple[list[int], list[int]]]
) -> Case:
    """Compare prompts whose beginnings are stored with the same prompts on vanilla."""
    pairs = [
        in_turn(i, (vanilla, Led(prompt, answer)), (engine, Led(prompt, answer, is_new=False)))
        for i, (prompt, answer) in enumerate(asked)
    ]
    return case_of(name, pairs)


def _lossless(
    bench: Bench, vanilla: Engine, contexts: Sequence[_Context], store: Path
) -> Iterator[str]:
    """Yield what differs from vanilla's text after lossless restores.

    Vanilla stays in the context, so that both sides evaluate the same tokens together.
    """
    settings = {"codec": "lossless", "recompute": False, "parked_tokens": 0, "store": str(store)}
    with bench.with_plugins(_NAME, **settings) as engine:
        for context in contexts:
            engine.follow(Led(context.stored, context.answer[:1], is_new=False))
        for number, context in enumerate(contexts, 1):
            vanilla.follow(Led(context.stored, context.answer[:1]))
            led = Led(context.first, context.answer, is_new=False)
            one, other = vanilla.follow(led), engine.follow(led)
            if not np.array_equal(one.best, other.best):
                yield f"after the lossless restore of context {number}, the text was another one"


def _settings(bench: Bench) -> KVChunksConfig:
    table = bench.config.plugins.get(_NAME, PluginTable(True, {}, {}))
    settings = validated(_NAME, KVChunksConfig, table)
    assert isinstance(settings, KVChunksConfig)
    return settings


def _unserved(state: State) -> str | None:
    restores = (state.plugins.get(_NAME) or {}).get("restores", 0)
    return None if restores else "no context was restored"

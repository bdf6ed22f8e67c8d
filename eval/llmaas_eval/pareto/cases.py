"""Configurations that the study compares."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from llmaas_eval.pareto.types import TYPES

__all__ = ["F16", "Case", "Choices", "cases"]

F16 = "F16"


class Choices(NamedTuple):
    """Choice of what to compare.

    Attributes:
        types: Keys in ``TYPES``; ``Q4_0`` is necessary.
        shares: Shares of the weights that stay in memory, in the exact mode. Without, nothing is
            streamed: a model of a few layers has no budget that works and keeps it out of memory.
        sparsities: Sparsities.
        levels: Levels of the elastic and of the pruned model.
        with_pruned: Whether to measure the model that LLM-Pruner ordered.
    """

    types: Sequence[str] = tuple(TYPES)
    shares: Sequence[float] = (0.8, 0.5, 0.3)
    sparsities: Sequence[float] = (0.5, 0.6, 0.7, 0.8)
    levels: Sequence[float] = (0.8, 0.6, 0.4, 0.2)
    with_pruned: bool = True


class Case(NamedTuple):
    """A configuration.

    Attributes:
        family: Name of the way to use less memory or time.
        setting: Setting within the family.
        file: Key of the model file.
        plugins: Configuration of the plugins, without a budget.
        share: Share of the weights that stays in memory; None keeps all.
        level: Level of an elastic model; None is not elastic.
    """

    family: str
    setting: str
    file: str
    plugins: Mapping[str, Mapping[str, Any]]
    share: float | None = None
    level: float | None = None


def cases(choices: Choices) -> Iterator[Case]:
    """Yield the configurations; the first is the whole model in F16."""
    for name in (F16, *choices.types):
        yield Case("llama.cpp", name, name, {})
    for share in choices.shares:
        exact = {"flash_weights": {"mode": "exact"}}
        yield Case("exact", f"{_percent(share)} in memory", "Q4_0", exact, share)
    for family, file in (("sparse", "equal"), ("sparse, distilled", "distilled")):
        for sparsity in choices.sparsities:
            sparse = {"mode": "sparse", "sparsity": sparsity, "selection": "top_k"}
            name = f"{_percent(sparsity)} left out"
            yield Case(family, name, file, {"flash_weights": sparse})
            if choices.shares:
                share = round(1 - sparsity, 3)  # as ActiveFlow chooses the sparsity
                name += f", {_percent(share)} in memory"
                yield Case(family, name, file, {"flash_weights": sparse}, share)
    for has_adapters in (False, True):
        family = "level with adapter" if has_adapters else "level"
        plugins = {"elastic": {"adapters": has_adapters}}
        for level in choices.levels:
            yield Case(family, _percent(level), "levels", plugins, level=level)
    for level in choices.levels if choices.with_pruned else ():
        plugins = {"elastic": {"adapters": False}}
        yield Case("LLM-Pruner", _percent(level), "pruned", plugins, level=level)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"

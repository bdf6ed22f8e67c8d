"""Answers of our levels, and of the narrowed models of other papers, to whole sets of questions."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from llmaas_eval.deadlines.loaded.answers import Kept
from llmaas_eval.deadlines.loaded.baselines import SCRATCH, narrowed
from llmaas_eval.deadlines.loaded.scoring import Item, Pair, Scores
from llmaas_eval.elastic.engine import Variant
from llmaas_eval.elastic.prepared import default_variant, prepared
from llmaas_plugins.elastic.uniform import LEVELS

__all__ = ["OURS", "PAIRS", "SEPARATE", "WHOLE", "Asked", "ByMethod", "answers"]

OURS = "ours"
WHOLE = (0, 0)
"""Indices of the levels of the whole model."""
_NARROWEST_ANSWER = 0.3
"""Narrower answers are needed for no promise of the grids, unless the prompt is as narrow."""
SEPARATE: Sequence[Pair] = [
    (prompt, answer)
    for prompt in range(len(LEVELS))
    for answer, level in enumerate(LEVELS)
    if level >= _NARROWEST_ANSWER
]
"""Settings of ours with a level for the prompt, and any other one for the answer: their indices."""
PAIRS: Sequence[Pair] = [
    *SEPARATE,
    *((i, i) for i, level in enumerate(LEVELS) if level < _NARROWEST_ANSWER),
]
"""All settings of ours: also those of one level with narrower answers."""

ByMethod = Mapping[str, Mapping[Pair, Scores]]
"""Answers to a set by method and pair of indices of levels."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A model and what it is asked.

    Attributes:
        name: Name of the model in tables.
        path: GGUF file.
        sets: Questions by name of their set.
        scratch: Smaller models that were trained from scratch in its place, by share.
        methods: Names of other papers' methods to ask as well.
        is_quick: Whether the search of widths is left out.
        settings: Settings to answer at by set, other methods at those of one level; None for all.
        is_compensated: Whether biases stand for the units that levels leave out.
        is_reordered: Whether the most important units come first; if not, levels use the same
            numbers of units in the model's own order, for which there is no compensation.
    """

    name: str
    path: Path
    sets: Mapping[str, Sequence[Item]]
    scratch: Mapping[float, Path]
    methods: Sequence[str]
    is_quick: bool = False
    settings: Mapping[str, Collection[Pair]] | None = None
    is_compensated: bool = True
    is_reordered: bool = True

    def settings_of(self, name: str) -> Collection[Pair]:
        """Return the settings to answer a set at."""
        return PAIRS if self.settings is None else self.settings[name]

    def ours(self, prepared: Path) -> Variant:
        """Return the levels of ours, by the file that was prepared of the model."""
        found = default_variant(prepared, LEVELS)
        if not self.is_reordered:
            return Variant(self.path, found.blocks, found.levels)
        return found if self.is_compensated else replace(found, biases={})


def answers(of: Asked, folder: Path) -> Mapping[str, ByMethod]:
    """Return the answers to each set; answers that the folder has are not measured again.

    Other methods have one level for prompt and answer.

    Raises:
        OSError: The folder cannot be written.
        RuntimeError: The model cannot be prepared.
    """
    models, kept = folder / "models", Kept(folder / "answers")
    ours = of.ours(prepared(of.path, models, is_quick=of.is_quick))
    found: dict[str, dict[str, Mapping[Pair, Scores]]] = {
        name: {
            OURS: kept.all_scores(f"{of.name}-{name}", lambda: ours, items, of.settings_of(name))
        }
        for name, items in of.sets.items()
    }
    for method in of.methods:
        if method != SCRATCH or of.scratch:
            for name, scores in _theirs(of, method, models, kept):
                found[name][method] = {**found[name].get(method, {}), **scores}
    return found


# -- inside --------------------------------------------------------------------------------------


def _theirs(
    of: Asked, method: str, models: Path, kept: Kept
) -> Iterator[tuple[str, Mapping[Pair, Scores]]]:
    """Yield the answers of a method's models: set, and scores by the levels that they stand for."""
    for one in narrowed(method, of.path, LEVELS, models, of.scratch):
        at = {LEVELS.index(share): (i, i) for share, i in one.places.items()}
        label = f"{method}-{one.label}"
        variant = functools.cache(one.make)
        for name, items in of.sets.items():
            own = {(i, i): at[i] for i in at if (i, i) in of.settings_of(name)}
            if own:
                about = f"{of.name}-{name}-{label}"
                scores = kept.all_scores(about, variant, items, {*own.values()})
                yield name, {pair: scores[place] for pair, place in own.items()}

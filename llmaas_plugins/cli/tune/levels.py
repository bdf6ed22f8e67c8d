"""``elastic`` and ``deadlines``: levels against the whole model, and requests that name nothing."""

from __future__ import annotations

from llmaas_hooks import ConfigError
from llmaas_plugins.cli.tune.bench import LEAST_ROUNDS, Bench, in_turn
from llmaas_plugins.cli.tune.figures import Figures, Pair, case_of, figures_of
from llmaas_plugins.cli.tune.worker import Led
from llmaas_plugins.elastic.metadata import read_elastic

__all__ = ["PREPARED", "measure_deadlines", "measure_levels"]

PREPARED = "prepared file"
"""Name of the comparison of the prepared file with the model that it was made of."""
_WHOLE = 1.0


def measure_levels(bench: Bench) -> Figures:
    """Compare each level with the whole model, and the prepared file with its source."""
    levels = _levels(bench)
    with bench.vanilla() as vanilla, bench.with_plugins("elastic") as engine:
        lengths = bench.lengths(vanilla, 1 + sum(levels))
        pieces = bench.pieces(vanilla, lengths)
        pairs: dict[float, list[Pair]] = {level: [] for level in levels}
        for i, piece in bench.rounds(pieces):
            found = {
                level: (engine if level else vanilla).follow(Led(*piece, level))
                for level in _in_turn(i, (None, *levels))
            }
            for level in levels:
                pairs[level].append(Pair(found[None], found[level]))
        cases = [case_of(f"level {level:.1f}", pairs[level]) for level in levels]
        broken = [
            "level 1.0 did not give the text of llama.cpp with the same file"
            for case, level in zip(cases, levels, strict=True)
            if level == _WHOLE and not case.is_same
        ]
        state, vanilla_state = engine.state(), vanilla.state()
        if bench.made != bench.model:
            with bench.vanilla(bench.model) as source:
                compared = [
                    Pair(source.follow(Led(*piece)), vanilla.follow(Led(*piece)))
                    for piece in pieces[:LEAST_ROUNDS]
                ]
            cases.insert(0, case_of(PREPARED, compared))
    return figures_of("elastic", cases, state, vanilla_state, broken=broken)


def measure_deadlines(bench: Bench) -> Figures:
    """Compare requests that name no latency with requests without the plugin."""
    if "elastic" not in bench.config.plugins:
        return Figures(unserved="it chooses among the levels of elastic, which has no table here")
    with bench.with_plugins("elastic") as without, bench.with_plugins("deadlines", "elastic") as on:
        lengths = bench.lengths(without, 2)
        pairs = [
            in_turn(i, (without, Led(*piece)), (on, Led(*piece)))
            for i, piece in bench.rounds(bench.pieces(without, lengths))
        ]
        case = case_of("nothing named", pairs)
        return figures_of("deadlines", [case], on.state(), without.state())


# -- inside --------------------------------------------------------------------------------------


def _in_turn(i: int, levels: tuple[float | None, ...]) -> tuple[float | None, ...]:
    """Return levels in another order in each round."""
    return levels[i % len(levels) :] + levels[: i % len(levels)]


def _levels(bench: Bench) -> tuple[float, ...]:
    found = read_elastic(bench.made)
    if found is None:
        raise ConfigError(
            f"{bench.made.name} has no levels; `llmaas setup {bench.model}` prepares it."
        )
    return tuple(found.levels)

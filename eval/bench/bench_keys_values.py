"""Levels of a model without grouped queries: keys and values whole, and cut with their groups."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

from llmaas_eval.elastic.prepared import variants, write_uniform
from llmaas_eval.elastic.scores import random_scores
from llmaas_eval.elastic.timing import N_TOKENS, claiming, opened, prepared, seconds_of
from llmaas_eval.models import SHAPE_UNGROUPED, write_random_model
from llmaas_eval.paired import repeats
from llmaas_eval.stats import median_interval, quartiles
from llmaas_plugins.elastic.uniform import LEVELS
from llmaas_plugins.elastic.units import blocks_of

SHOWN = (1.0, 0.6, 0.4, 0.2)


@pytest.fixture(scope="module")
def sides(bench_dir):
    """Return a model with the paper's widths, with keys and values whole and with them cut."""
    source = bench_dir / "random-ungrouped-q4_0.gguf"
    if not source.exists():
        write_random_model(source, SHAPE_UNGROUPED)
    found = []
    for name, is_cut in (("whole", False), ("cut", True)):
        path = source.with_stem(f"{source.stem}-{name}")
        if not path.exists():
            scores = random_scores(blocks_of(source), 0)
            write_uniform(source, path, scores, cuts_keys_values=is_cut)
        found.append(variants(path, LEVELS)["uniform"])
    return found


@pytest.mark.parametrize("what", ["token", 512])
def bench_cut(benchmark, sides, what):
    """Measure a token after 512, or a prompt, by level on one thread; both sides take turns."""
    taken = []
    with contextlib.ExitStack() as stack:
        claimer = claiming(stack)
        contexts = [opened(stack, claimer, side, 1) for side in sides]
        steps = [prepared(context, what) for context, _ in contexts]

        def one_round():
            seconds = np.empty((len(SHOWN), len(sides)))
            for i, level in enumerate(SHOWN):
                for side in range(len(sides))[:: 1 if len(taken) % 2 else -1]:
                    contexts[side][1].level = LEVELS.index(level)
                    seconds[i, side] = seconds_of(*steps[side])
            taken.append(seconds)

        one_round()
        taken.clear()
        benchmark.pedantic(one_round, rounds=repeats(40 if what == "token" else 10))
    for level, (whole, cut) in zip(SHOWN, np.array(taken).transpose(1, 2, 0), strict=True):
        n, ratio = N_TOKENS if what == "token" else 1, median_interval(cut / whole)
        benchmark.extra_info[f"{level:.0%}"] = {
            "whole": quartiles(1e3 * whole / n),
            "cut": quartiles(1e3 * cut / n),
            "ratio": "{:.3f} ({:.3f} to {:.3f})".format(*ratio),
            "shares": [_share(side, level) for side in sides],
        }


def _share(side, level):
    """Return the share of the bytes of all matrices that a level computes with."""
    return side.blocks.computed_share(side.blocks.share(side.levels[LEVELS.index(level)]))

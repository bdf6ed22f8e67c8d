"""``flash_weights``: a model that does not fit into the memory budget."""

from __future__ import annotations

from llmaas_plugins.cli.output import size_text
from llmaas_plugins.cli.tune.bench import Bench, Engine, in_turn
from llmaas_plugins.cli.tune.figures import Case, Figures, case_of, figures_of
from llmaas_plugins.cli.tune.worker import Led
from llmaas_plugins.config import validated
from llmaas_plugins.flash_weights.channels import channel_path
from llmaas_plugins.flash_weights.config import FlashWeightsConfig
from llmaas_plugins.flash_weights.packed import packed_path

__all__ = ["EXACT", "SPARSE", "measure_streaming"]

_NAME = "flash_weights"
EXACT, SPARSE = "exact", "sparse"
"""Modes, and the names of their comparisons."""


def measure_streaming(bench: Bench) -> Figures:
    """Compare streamed weights with stock llama.cpp, which has all of the machine's memory."""
    is_sparse = _settings(bench).mode == SPARSE
    cases, broken = [], []
    with bench.vanilla() as vanilla:
        with bench.with_plugins(_NAME, mode=EXACT) as engine:
            state = engine.state()
            if state.plugins[_NAME]["models"]:  # else it fits
                cases.append(_case(bench, EXACT, vanilla, engine))
                state = engine.state()
        is_packed = packed_path(bench.made).exists()  # else products are those of other kernels
        if cases and is_packed and not cases[0].is_same:
            broken.append("the exact mode did not give the text of llama.cpp")
        if is_sparse or (cases and channel_path(bench.made).exists()):
            with bench.with_plugins(_NAME, mode=SPARSE) as engine:
                cases.append(_case(bench, SPARSE, vanilla, engine))
                state = engine.state() if is_sparse else state
        budget = state.plugins[_NAME]["memory_budget"]
        is_set = _settings(bench).memory_budget or bench.config.memory.budget
        if is_set and state.peak_bytes > budget:
            broken.append(
                f"the process took {size_text(state.peak_bytes)}, above its memory budget of "
                f"{size_text(budget)}"
            )
        return figures_of(_NAME, cases, state, vanilla.state(), broken=broken)


# -- inside --------------------------------------------------------------------------------------


def _settings(bench: Bench) -> FlashWeightsConfig:
    settings = validated(_NAME, FlashWeightsConfig, bench.config.plugins[_NAME])
    assert isinstance(settings, FlashWeightsConfig)
    return settings


def _case(bench: Bench, name: str, vanilla: Engine, engine: Engine) -> Case:
    lengths = bench.lengths(engine, 4)  # twice, if there is a sparse mode, too
    pieces = bench.pieces(vanilla, lengths)
    return case_of(
        name,
        [in_turn(i, (vanilla, Led(*one)), (engine, Led(*one))) for i, one in bench.rounds(pieces)],
    )

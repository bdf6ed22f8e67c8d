"""All plugins that passed, as an app gets them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from llmaas_hooks import ConfigError
from llmaas_plugins.cli.tune.bench import Bench, in_turn
from llmaas_plugins.cli.tune.figures import Figures, case_of, figures_of
from llmaas_plugins.cli.tune.restores import own_folder
from llmaas_plugins.cli.tune.worker import Led

__all__ = ["TOGETHER", "measure_together"]

TOGETHER = "together"
"""Name of the part."""


def measure_together(bench: Bench, passed: Sequence[str]) -> Figures:
    """Compare the user's model with all plugins that passed with stock llama.cpp.

    Args:
        bench: Models, texts and time.
        passed: Names of the plugins.

    Raises:
        ConfigError: A plugin failed.
    """
    tables = {name: replace(bench.config.plugins[name], enabled=True) for name in passed}
    with own_folder(bench) as folder, bench.vanilla(bench.model) as vanilla:
        if (kv := tables.get("kv_chunks")) is not None:  # the app's own contexts stay out of it
            tables["kv_chunks"] = replace(kv, values={**kv.values, "store": str(folder / "kv")})
        with bench.as_configured(tables) as engine:
            lengths = bench.lengths(vanilla, 3)
            pairs = [
                in_turn(i, (vanilla, Led(*one)), (engine, Led(*one)))
                for i, one in bench.rounds(bench.pieces(vanilla, lengths))
            ]
            state = engine.state()
            if state.errors:
                raise ConfigError(f"a plugin failed: {state.errors}")
            return figures_of(TOGETHER, [case_of("new requests", pairs)], state, vanilla.state())

"""Run workloads with the memory divided as requests need it, and with fixed divisions."""

from __future__ import annotations

import functools
import itertools
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llmaas_eval.division.worker import Job, run
from llmaas_eval.division.workloads import WORKLOADS, Turn
from llmaas_eval.measured import measured_once
from llmaas_eval.models import SHAPE_1B, SHAPE_200M, SHAPE_TINY, Shape, pack, write_random_model
from llmaas_plugins.process_memory import SPARE_BYTES

__all__ = ["SHAPES", "Setting", "Study"]

SHAPES = {"tiny": SHAPE_TINY, "200m": SHAPE_200M, "1b": SHAPE_1B}
_LEAST_RAM = 24 << 20
"""Bytes that fixed divisions leave to contexts and transfer buffers at least."""
_ARENA = 32 << 20
"""Bytes that streamed weights pass through."""
_MORE = 6 << 20
"""Bytes that streaming takes beside, and by which two equal processes differ."""
_CELL_VALUES, _VALUE_BYTES = 2, 2
_BATCH, _ROOM = 512, 16
"""Tokens of a batch that touches all of the compute buffers, and tokens left for an answer."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Sizes of the study.

    Attributes:
        shape: Name of the model's shape.
        n_contexts: Number of contexts.
        n_tokens: Tokens of each before the first request.
        n_turns: Requests of a workload, about.
        uses_disk: Whether contexts may be stored on disk. If not, lost ones are evaluated again.
        share: Share of the bytes of model and contexts that is their budget.
        seed: Seed of the workloads.
    """

    shape: str
    n_contexts: int
    n_tokens: int
    n_turns: int
    uses_disk: bool
    share: float
    seed: int


class Study:
    """Runs that are kept in a folder: what was run is not run again."""

    def __init__(self, folder: Path, setting: Setting) -> None:
        """Write the model if it is missing."""
        self._folder, self._setting = folder, setting
        self._shape = SHAPES[setting.shape]
        self._model = folder / f"random-{setting.shape}.gguf"
        if not self._model.exists():
            write_random_model(self._model, self._shape)
        pack(self._model)
        self._n_ctx = 256 * -(-(setting.n_tokens + 40 * setting.n_turns) // 256)
        self._store = folder / "store"

    def rows(
        self, workloads: Sequence[str], shares: Sequence[float], n_rounds: int
    ) -> Iterator[dict[str, Any]]:
        """Yield a row for each round, workload and division; ``share`` is None for ours.

        Args:
            workloads: Names of the workloads.
            shares: Shares of the budget that fixed divisions give to contexts.
            n_rounds: Rounds; each runs all divisions of a workload one after the other, and begins
                with another one than the round before.
        """
        base = measured_once(self._folder, ["base", repr(self._setting)], self._base)["bytes"]
        divisions = [None, *shares]
        for number, name in itertools.product(range(n_rounds), workloads):
            first = number % len(divisions)
            for share in divisions[first:] + divisions[:first]:
                found = self._measured(number, name, self._config(base, share))
                yield {"workload": name, "share": share, "budget": self._budget(base), **found}

    def _measured(self, number: int, workload: str, config: dict[str, Any]) -> dict[str, Any]:
        """Return what a round's run of a workload found, now or earlier."""
        measure = functools.partial(self._run, config, self._turns(workload))
        about = [workload, repr(self._setting), config, number]
        found: dict[str, Any] = measured_once(self._folder, about, measure)
        return found

    def _turns(self, name: str) -> list[Any]:
        rng = np.random.default_rng(self._setting.seed)
        return WORKLOADS[name](rng, self._setting.n_contexts, self._setting.n_turns)

    def _base(self) -> dict[str, Any]:
        """Return the bytes of a streaming process without weights and without contexts in RAM.

        The process that is measured has cells, transfer buffers and compute buffers, but no arena:
        its model fits into memory, so llama.cpp holds it.
        """
        config = self._config(8 << 30, None)
        n_prompt = min(_BATCH, self._n_ctx - self._setting.n_tokens - _ROOM)
        found = self._run(config, [Turn(0, n_prompt, 4)])
        contexts = found["status"]["kv_chunks"]["ram_bytes"]
        rest = found["peak_bytes"] - self._weights() - contexts
        return {"bytes": rest + _ARENA + _MORE}

    def _weights(self) -> int:
        return self._model.stat().st_size

    def _contexts(self) -> int:
        """Return the bytes of all contexts' cells."""
        return self._cell_bytes() * self._setting.n_tokens * self._setting.n_contexts

    def _cell_bytes(self) -> int:
        shape: Shape = self._shape
        return shape.n_layer * shape.n_head_kv * shape.head_dim * _CELL_VALUES * _VALUE_BYTES

    def _divided(self) -> int:
        """Return the bytes to divide."""
        return int(self._setting.share * (self._weights() + self._contexts()))

    def _budget(self, base: int) -> int:
        return base + SPARE_BYTES + self._divided()

    def _config(self, base: int, share: float | None) -> dict[str, Any]:
        budget = self._budget(base)
        kv: dict[str, Any] = {"codec": "lossless", "store": str(self._store)}
        if not self._setting.uses_disk:
            kv["disk_budget"] = 0
        flash: dict[str, Any] = {}
        config: dict[str, Any] = {"plugins": {"kv_chunks": kv, "flash_weights": flash}}
        if share is None:
            config["memory"] = {"budget": budget}
        else:
            flash["memory_budget"] = budget
            kv["ram_budget"] = max(_LEAST_RAM, int(share * self._divided()))
        return config

    def _run(self, config: dict[str, Any], turns: Sequence[Any]) -> dict[str, Any]:
        """Run a workload; with a disk tier, all contexts are on disk at first."""
        setting = self._setting
        lengths = [setting.n_tokens] * setting.n_contexts
        job = Job(str(self._model), config, self._n_ctx, lengths, turns)
        if not setting.uses_disk:
            return run(job)
        filled = self._folder / f"filled-{setting.shape}-{setting.n_contexts}-{setting.n_tokens}"
        shutil.rmtree(self._store, ignore_errors=True)
        if filled.exists():
            shutil.copytree(filled, self._store)
            return run(job)
        run(job._replace(turns=[]))
        shutil.move(self._store, filled)
        return self._run(config, turns)

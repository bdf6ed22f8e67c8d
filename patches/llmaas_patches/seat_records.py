"""Records of a request that ``Llama``, its engine and its tracker keep beside its cells."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np

if TYPE_CHECKING:
    from llmaas_patches.cell_tracker import CellTracker
    from llmaas_patches.engine import LlamaEngine

__all__ = ["SeatRecords"]

_OF_LLAMA = ("n_tokens", "input_ids", "_requires_eval", "_sampler", "_seed", "_mirostat_mu")
_OF_ENGINE = ("n_said", "n_outputs", "app_drafts", "keeps_cells", "_has_restored")
_OF_TRACKER = ("n_explained", "sparse_from", "app")


@dataclass(slots=True)
class SeatRecords:
    """Records of one request, by name."""

    llama: dict[str, Any]
    engine: dict[str, Any]
    tracker: dict[str, Any]

    @classmethod
    def of(cls, engine: LlamaEngine, tracker: CellTracker) -> Self:
        """Return the records that are in use."""
        return cls(
            {name: getattr(engine.llama, name) for name in _OF_LLAMA},
            {name: getattr(engine, name) for name in _OF_ENGINE},
            {name: getattr(tracker, name) for name in _OF_TRACKER},
        )

    @classmethod
    def unused(cls, engine: LlamaEngine) -> Self:
        """Return the records of an engine that no request has used."""
        empty = {"n_tokens": 0, "input_ids": np.empty_like(engine.llama.input_ids)}
        return cls(
            empty | {"_sampler": None, "_requires_eval": True},
            {"n_outputs": 1, "_has_restored": False},
            {"n_explained": 0, "sparse_from": None, "app": None},
        )

    def apply(self, engine: LlamaEngine, tracker: CellTracker) -> None:
        """Put the records in use."""
        for target, values in (
            (engine.llama, self.llama),
            (engine, self.engine),
            (tracker, self.tracker),
        ):
            for name, value in values.items():
                setattr(target, name, value)

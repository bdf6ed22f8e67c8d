"""Tokens a second of a streamed model with and without drafts, in alternation."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llmaas_eval.data import VALIDATION_TEXT, packaged_documents, read_documents
from llmaas_eval.drafts.traces import accepted_by_place, traces_of
from llmaas_eval.drafts.worker import App, Setup
from llmaas_eval.elastic.prepared import prepared, write_uniform
from llmaas_eval.elastic.texts import windows_of
from llmaas_eval.measured import measured_once
from llmaas_eval.models import SHAPE_1B, SHAPE_200M, pack, write_random_model
from llmaas_eval.switching.groups import can_limit_memory, memory_group
from llmaas_plugins.elastic.uniform import LEVELS
from llmaas_plugins.elastic.units import Calibration, Scores, blocks_of
from llmaas_plugins.reference_model import reference_model_path

__all__ = ["SHAPES", "Setting", "Study"]

SHAPES = {"200m": SHAPE_200M, "1b": SHAPE_1B}
_NARROW = LEVELS[1:]
_MIB = 1 << 20
_N_PROMPT_TOKENS = 64
_N_CTX = 512


@dataclass(frozen=True, slots=True)
class Setting:
    """Sizes of the study.

    Attributes:
        shape: Name of the model's shape.
        n_prompts: Held-out texts after which levels draft.
        n_said: Tokens that the whole model says after each.
        n_rounds: Pairs of runs, one without and one with drafts.
        n_tokens: Tokens of a run.
        n_warm: Tokens before the first round.
        is_quick: Whether the levels are not searched, and the texts are the packaged ones.
    """

    shape: str
    n_prompts: int
    n_said: int
    n_rounds: int
    n_tokens: int
    n_warm: int
    is_quick: bool


class Study:
    """Runs on a model in a folder."""

    def __init__(self, folder: Path, data: Path, setting: Setting) -> None:
        """Write the models if they are missing."""
        self._folder, self._data, self._setting = folder, data, setting
        self._model = _random_model(folder, setting.shape)

    def rows(self, shares: Sequence[float]) -> list[dict[str, Any]]:
        """Return a row for each share of the model's bytes that the process may take."""
        setting = self._setting
        files = [reference_model_path()]
        files += [] if setting.is_quick else [self._data / VALIDATION_TEXT]
        digests = [hashlib.sha256(path.read_bytes()).hexdigest() for path in files]
        about = ["traces", setting.n_prompts, setting.n_said, setting.is_quick, *digests]
        found = measured_once(self._folder, about, self._traces)
        return [self._row(share, found) for share in shares]

    def _traces(self) -> dict[str, Any]:
        setting, model = self._setting, reference_model_path()
        texts = packaged_documents() if setting.is_quick else self._held_out()
        windows = windows_of(model, texts, setting.n_prompts, _N_PROMPT_TOKENS)
        path = prepared(model, self._folder / "reference", is_quick=setting.is_quick)
        return traces_of(path, windows.tolist(), _NARROW, setting.n_said)

    def _held_out(self) -> list[str]:
        return read_documents(self._data / VALIDATION_TEXT)

    def _row(self, share: float, traces: dict[str, Any]) -> dict[str, Any]:
        setting = self._setting
        budget = int(share * self._model.stat().st_size) // _MIB * _MIB
        with contextlib.ExitStack() as stack:
            apps = [stack.enter_context(self._app(stack, budget, on, traces)) for on in (0, 1)]
            for app in apps:
                app.say(setting.n_warm, 0)
            seconds = np.empty((setting.n_rounds, 2))
            for i in range(setting.n_rounds):
                for which in (0, 1) if i % 2 else (1, 0):
                    seconds[i, which] = apps[which].say(setting.n_tokens, i + 1)
            exact, drafting = (app.report() for app in apps)
        levels = {level: accepted_by_place(rows) for level, rows in traces.items()}
        return {
            "share": share,
            "budget": budget,
            "exact_s": seconds[:, 0].tolist(),
            "drafts_s": seconds[:, 1].tolist(),
            "accepted_by_place": levels,
            "exact": exact,
            "drafts": drafting,
        }

    def _app(
        self, stack: contextlib.ExitStack, budget: int, is_on: int, traces: dict[str, Any]
    ) -> App:
        group = None
        if can_limit_memory():
            group = stack.enter_context(memory_group())
            group.limit(budget)
        flash = {"memory_budget": budget, "arena": "16 MiB"}
        plugins = {"flash_weights": flash, "elastic": {"drafts": bool(is_on)}}
        config = {"on_error": "raise", "plugins": plugins}
        where = None if group is None else str(group.path)
        return App(Setup(str(self._model), where, config, _N_CTX, traces))


def _random_model(folder: Path, shape: str) -> Path:
    """Return a prepared and packed random model; write it if it is missing."""
    source, path = folder / f"random-{shape}.gguf", folder / f"random-{shape}.elastic.gguf"
    if not path.exists():
        if not source.exists():
            write_random_model(source, SHAPES[shape])
        blocks, rng = blocks_of(source), np.random.default_rng(0)
        scores = Scores(
            rng.random((blocks.n_layers, blocks.n_groups)),
            rng.random((blocks.n_layers, blocks.n_ff)),
            Calibration("", 0, 0, "random"),
        )
        write_uniform(source, path, scores)
    pack(path)
    return path

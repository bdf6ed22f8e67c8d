"""Plugin that records each request of a service: what it read, its levels, and flagged promises.

It runs inside the server that the study starts. A streamed answer does not carry these.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from pydantic import BaseModel, ConfigDict

from llmaas_hooks import Levels, Request, RequestStats, hookimpl

__all__ = ["Record", "Recorder", "install", "key_of", "read_records"]

_NAME = "recorder"
_PHASES = ("ttft", "tpot")


class RecorderConfig(BaseModel):
    """Table ``[plugins.recorder]``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: Path


class Record(NamedTuple):
    """A request that ended.

    Attributes:
        key: Key of its prompt.
        prefill: Level of the prompt.
        decode: Level of the answer; the last and narrowest one if it has several.
        n_reused: Prompt tokens whose cells were there.
        n_generated: Tokens of the answer.
        is_planned: Whether ``deadlines`` planned the request.
        infeasible: Phases that were flagged.
        server_ms: Time to the first token that ``deadlines`` measured; None without a promise.
        share: Share of the prompt's tokens that ``short_prompts`` was told to read; 1 if none.
    """

    key: str
    prefill: float
    decode: float
    n_reused: int
    n_generated: int
    is_planned: bool
    infeasible: list[str]
    server_ms: float | None
    share: float = 1.0


class Recorder:
    """Plugin that appends a line of JSON for each request."""

    Config: ClassVar[type[RecorderConfig]] = RecorderConfig

    def __init__(self, config: RecorderConfig) -> None:
        """Take the path of the file."""
        self._path = config.path
        self._levels: dict[int, Levels] = {}

    @hookimpl
    def llmaas_request_begin(self, request: Request, levels: Levels | None) -> None:
        """Keep the levels until the request ends."""
        self._levels[id(request)] = (levels or Levels()).over(request.levels)

    @hookimpl
    def llmaas_request_end(self, request: Request, stats: RequestStats) -> None:
        """Append the request."""
        levels = self._levels.pop(id(request), Levels())
        noted = request.notes or {}
        notes = noted.get("deadlines", {})
        phases = [notes[name] for name in _PHASES if notes.get(name)]
        whole = request.whole or request
        text = request.engine.llama.detokenize(whole.tokens.tolist())
        record = Record(
            key_of(text.decode("utf-8", "ignore")),
            1.0 if levels.prefill is None else levels.prefill,
            _decode(levels, notes),
            stats.n_reused,
            stats.n_generated,
            any(phase["expected_ms"] is not None for phase in phases),
            [*notes.get("infeasible", ())],
            (notes.get("ttft") or {}).get("measured_ms"),
            noted.get("short_prompts", {}).get("share", 1.0),
        )
        with self._path.open("a", encoding="utf-8") as file:
            file.write(f"{json.dumps(record._asdict())}\n")


def _decode(levels: Levels, notes: Mapping[str, Any]) -> float:
    planned = (notes.get("tpot") or {}).get("level")
    found = levels.decode if planned is None else planned
    return 1.0 if found is None else found


def key_of(prompt: str) -> str:
    """Return a key of a prompt's text; white space at its ends does not count."""
    return hashlib.sha256(prompt.strip().encode()).hexdigest()[:16]


def read_records(path: Path) -> dict[str, Record]:
    """Return the last record of each prompt by its key; none without a file."""
    if not path.exists():
        return {}
    rows: list[dict[str, Any]] = [*map(json.loads, path.read_text("utf-8").splitlines())]
    return {row["key"]: Record(**row) for row in rows}


def install(folder: Path) -> None:
    """Write the metadata that makes the plugin known to processes with ``folder`` on their path."""
    metadata = folder / "llmaas_eval_recorder-0.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (metadata / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: llmaas-eval-recorder\nVersion: 0\n", encoding="utf-8"
    )
    (metadata / "entry_points.txt").write_text(
        f"[llmaas_plugins]\n{_NAME} = {Recorder.__module__}:{Recorder.__qualname__}\n",
        encoding="utf-8",
    )

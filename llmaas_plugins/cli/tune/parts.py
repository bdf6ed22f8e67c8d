"""Parts of ``llmaas tune``: one for each plugin, and one for all that passed."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from llmaas_hooks import LlmaasError
from llmaas_plugins import __version__
from llmaas_plugins.cli.files import content_of
from llmaas_plugins.cli.models import identified
from llmaas_plugins.cli.output import duration_text, one_line
from llmaas_plugins.cli.setup.steps import widths_of
from llmaas_plugins.cli.tune.bench import Bench, TimeIsUpError
from llmaas_plugins.cli.tune.datastore import datastore_path, measure_datastore
from llmaas_plugins.cli.tune.figures import Figures
from llmaas_plugins.cli.tune.levels import measure_deadlines, measure_levels
from llmaas_plugins.cli.tune.record import Kept, Record, key_of
from llmaas_plugins.cli.tune.restores import measure_restores
from llmaas_plugins.cli.tune.streaming import measure_streaming
from llmaas_plugins.cli.tune.together import TOGETHER, measure_together
from llmaas_plugins.cli.tune.verdicts import Verdict, verdict_on
from llmaas_plugins.config import Config
from llmaas_plugins.elastic.latency import Machine
from llmaas_plugins.elastic.metadata import read_elastic
from llmaas_plugins.flash_weights.channels import channel_path
from llmaas_plugins.flash_weights.packed import packed_path

__all__ = ["Outcome", "Plan", "measured", "parts_of", "share_of"]

_NEEDS: Mapping[str, tuple[str, ...]] = {"deadlines": ("deadlines", "elastic")}
"""Plugins whose settings a part depends on, if they are not only its own."""
_WEIGHTS = {
    "kv_chunks": 5, "elastic": 6, "deadlines": 2, "flash_weights": 3, "knn_lm": 3, TOGETHER: 2,
}  # fmt: skip
"""Shares of the time, relative to each other. Parts come in this order."""
_WHAT = {
    "kv_chunks": "kv_chunks, contexts that come back",
    "elastic": "elastic, speed and quality of each level",
    "deadlines": "deadlines, requests that name no latency",
    "flash_weights": "flash_weights, weights beyond the memory budget",
    "knn_lm": "knn_lm, chats that the datastore has not seen",
    TOGETHER: "all that passed together",
}
_MEASURES: Mapping[str, Callable[[Bench], Figures]] = {
    "kv_chunks": measure_restores,
    "elastic": measure_levels,
    "deadlines": measure_deadlines,
    "flash_weights": measure_streaming,
}
_LEFT_OUT = Verdict(
    state="left out",
    reason="the time was up; the same command goes on with it, a larger --minutes gives it more",
)
_log = logging.getLogger("llmaas.cli")


@dataclass(frozen=True, slots=True)
class Plan:
    """Model, texts and time to measure with.

    Attributes:
        model: The user's model.
        made: File that apps load in its place; the model itself if there is none.
        config: The user's configuration.
        texts: Texts that chose nothing.
        exports: Chats to judge the datastore with.
        minutes: Minutes for all parts.
    """

    model: Path
    made: Path
    config: Config
    texts: tuple[bytes, ...]
    exports: tuple[Path, ...]
    minutes: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of a part.

    Attributes:
        verdict: The verdict.
        figures: The figures; None if it failed.
    """

    verdict: Verdict
    figures: Figures | None = None


def parts_of(config: Config) -> list[str]:
    """Return the parts for a configuration, in their order."""
    found = [name for name in _WEIGHTS if name in config.plugins]
    return [*found, TOGETHER] if found else []


def measured(
    plan: Plan, record: Record, say: Callable[[str], None], *, is_fresh: bool
) -> dict[str, Outcome]:
    """Measure the parts that are not known yet, each within its share of the time that is left.

    A part that fails does not keep the others from being measured. When the time for all parts is
    up, the one that is measured is left out, and so are those after it.

    Args:
        plan: Model, texts and time.
        record: Place of what is known.
        say: Function that is told of the progress.
        is_fresh: Whether to measure again what is known.

    Raises:
        StoreError: The record cannot be written.
    """
    names, ends = parts_of(plan.config), time.monotonic() + 60 * plan.minutes
    outcomes: dict[str, Outcome] = {}
    for number, name in enumerate(names, 1):
        verdicts = {done: one.verdict for done, one in outcomes.items()}
        passed = [done for done, verdict in verdicts.items() if verdict.state == "on"]
        if name == TOGETHER and not passed:
            break
        key = _key(plan, name, passed)
        found: Kept | Verdict | None = None if is_fresh else record.get(name, key)
        if any(verdicts.get(one) == _LEFT_OUT for one in _NEEDS.get(name, ())):
            found = _LEFT_OUT
        if found is None:
            seconds = share_of(name, names[number - 1 :], ends - time.monotonic())
            say(f"part {number} of {len(names)}: {_WHAT[name]}, {_at_most(seconds)}")
            found = _tried(plan, name, passed, key, (seconds, ends))
        if isinstance(found, Verdict):
            outcomes[name] = Outcome(found)
            continue
        verdict = verdict_on(name, found.figures, verdicts)
        record.keep(name, found.model_copy(update={"verdict": verdict}))
        outcomes[name] = Outcome(verdict, found.figures)
    return outcomes


def share_of(name: str, left: Sequence[str], seconds: float) -> float:
    """Return a part's share of the seconds that are left for it and for the parts after it."""
    return max(seconds, 0.0) * _WEIGHTS[name] / sum(_WEIGHTS[one] for one in left)


# -- inside --------------------------------------------------------------------------------------


def _tried(
    plan: Plan, name: str, passed: Sequence[str], key: str, time_s: tuple[float, float]
) -> Kept | Verdict:
    """Measure a part; return the verdict if it fails, or if there is no time for it."""
    bench = Bench(plan.model, plan.made, plan.config, plan.texts, *time_s)
    try:
        figures = _figures(plan, name, passed, bench)
    except TimeIsUpError:
        return _LEFT_OUT
    except Exception as error:
        _log.debug("%s failed", name, exc_info=error)
        kind = "" if isinstance(error, LlmaasError) else f"{type(error).__name__}: "
        return Verdict(state="failed", reason=one_line(f"{kind}{error}"))
    return Kept(key=key, seconds=round(bench.seconds - bench.left_s, 1), figures=figures)


def _figures(plan: Plan, name: str, passed: Sequence[str], bench: Bench) -> Figures:
    if name == TOGETHER:
        return measure_together(bench, passed)
    if name == "knn_lm":
        return measure_datastore(bench, plan.exports)
    return _MEASURES[name](bench)


def _at_most(seconds: float) -> str:
    if seconds <= 0:
        return "left out, because the time is up"
    return f"at most about {duration_text(seconds)}"


def _key(plan: Plan, name: str, passed: Sequence[str]) -> str:
    """Return a name of what a part measures: model, settings, texts, machine and versions."""
    plugins = passed if name == TOGETHER else _NEEDS.get(name, (name,))
    settings = {
        one: dict(plan.config.plugins[one].values) for one in plugins if one in plan.config.plugins
    }
    return key_of(
        __version__,
        Machine.this().model_dump(),
        name,
        plan.minutes,
        plan.config.memory.budget,
        [identified(plan.model), identified(plan.made)],
        settings,
        [hashlib.sha256(text).hexdigest() for text in plan.texts],
        [hashlib.sha256(content_of(path)).hexdigest() for path in plan.exports],
        [_state(path) for one in plugins for path in _files(plan, one)],
        widths_of(plan.made, _table(plan)) if "elastic" in plugins else [],
    )


def _files(plan: Plan, plugin: str) -> Sequence[Path]:
    """Return the files beside the model that a plugin uses."""
    if plugin == "flash_weights":
        return packed_path(plan.made), channel_path(plan.made)
    return (datastore_path(plan.config),) if plugin == "knn_lm" else ()


def _state(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns


def _table(plan: Plan) -> str | None:
    """Return the name of the widths in use; None if no levels are."""
    found, settings = read_elastic(plan.made), plan.config.plugins.get("elastic")
    if found is None or settings is None:
        return None
    asked = settings.values.get("table")
    return str(asked or ("searched" if "searched" in found.tables else "uniform"))

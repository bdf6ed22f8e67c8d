"""Run the day: every call on every system, in an order that changes from call to call."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmaas_hooks import ConfigError
from llmaas_plugins.cli.day.prepared import (
    STEPS,
    Prepared,
    environment,
    found_files,
    made_files,
    own_home,
)
from llmaas_plugins.cli.day.systems import (
    VANILLA,
    Memory,
    System,
    side_of,
    systems_of,
)
from llmaas_plugins.cli.day.trace import (
    Call,
    Pace,
    calls_of,
    fitting,
    openings,
    order_of,
    talks_from,
)
from llmaas_plugins.cli.day.worker import N_TIMED, Called, Side, Usage, serve
from llmaas_plugins.cli.output import duration_text, progress_bar, size_text
from llmaas_plugins.cli.setup.processes import SLEEPING
from llmaas_plugins.config import load_config
from llmaas_plugins.demo.run import kv_bytes_per_token, own_folder
from llmaas_plugins.machine import available_bytes
from llmaas_plugins.model.loading import vocabulary
from llmaas_plugins.worker_process import WorkerProcess, worker_process

__all__ = ["Day", "Options", "run_day"]

_THEN = "Close other programs, or use a smaller model."
_LEAST_CALLS = 20
"""Calls that are made even if they take longer than planned."""
_BATCH = 128
"""Tokens of a batch, for every system: a short one needs a small compute buffer."""
_ROUND_CTX = 256
_STEP_S: Mapping[str, float] = {"prepare": 3, "pack": 1, "profile": 6, "datastore": 4}
"""Seconds of the packaged model's steps, about."""
_MORE = 1.3
"""Seconds of a call with its work behind, relative to the seconds that callers wait."""
_KEPT = 0.5
"""Time of a call with a context that was kept, relative to one whose prompt is evaluated."""
_PROCESS_BYTES = 200 << 20
"""Memory of a system beside its model and its contexts, about."""


@dataclass(frozen=True, slots=True)
class Options:
    """Options of the demo.

    Attributes:
        model: Path of the model; None for the packaged one.
        config: Path of the configuration that names the model's files; None for the default.
        data: Chat export with the conversations; None for the packaged ones.
        n_calls: Most calls; None for as many as fit into the time.
        n_new: Most tokens of a reply.
        share: Memory, as a share of the bytes of the model and all contexts.
        minutes: Minutes for everything.
        seed: Random seed of the order of calls.
        threads: CPU threads.
    """

    model: Path | None
    config: str | None
    data: Path | None
    n_calls: int | None
    n_new: int
    share: float
    minutes: float
    seed: int
    threads: int


@dataclass(frozen=True, slots=True)
class Day:
    """Measurements of a day.

    Attributes:
        options: Options of the run.
        files: Model with the files that were made for it.
        n_contexts: Number of contexts.
        model_bytes: Bytes of the model.
        contexts_bytes: Bytes of all contexts' cells at the end.
        shared_bytes: Memory for weights and contexts that each system had.
        pace: Times of the whole model with all memory.
        calls: Calls that were made.
        results: Results of each system, in the order of ``calls``.
        usage: Memory of each system.
        budgets: Memory budget of each process; None without one.
        seconds: Seconds of the whole run.
    """

    options: Options
    files: Prepared
    n_contexts: int
    model_bytes: int
    contexts_bytes: int
    shared_bytes: int
    pace: Pace
    calls: Sequence[Call]
    results: Mapping[str, Sequence[Called]]
    usage: Mapping[str, Usage]
    budgets: Mapping[str, int | None]
    seconds: float

    @property
    def is_vanilla_limited(self) -> bool:
        """Whether vanilla had no more memory than the others.

        Pages of a model that is larger than the memory come and go as the system likes, and only a
        cgroup could limit them.
        """
        return self.model_bytes <= self.shared_bytes


def run_day(options: Options, say: Callable[[str], None]) -> Day:
    """Prepare the model, run all systems, and return what was measured.

    Args:
        options: Options of the run.
        say: Function that is told of the progress.

    Raises:
        ConfigError: The data or the model cannot be used.
        LlmaasError: A step or a system failed.
    """
    started = time.monotonic()
    with own_folder() as folder:
        home = {} if options.model else own_home(folder / "home")
        # systems that wait for their turn must not take processors from the one that works
        with environment(SLEEPING | home):
            return _Run(options, folder, say, started).day()


# -- inside --------------------------------------------------------------------------------------


class _Run:
    def __init__(
        self, options: Options, folder: Path, say: Callable[[str], None], started: float
    ) -> None:
        self._options, self._folder, self._say, self._started = options, folder, say, started
        n_steps = len(STEPS) if options.model is None else 0
        self._step, self._n_steps = 0, n_steps + 3

    def day(self) -> Day:
        options = self._options
        talks = talks_from(options.data)  # a mistake there is told before anything takes time
        files = self._files()
        with vocabulary(files.model) as vocab:
            order = order_of(talks, options.seed)
            calls = calls_of(vocab, talks, order, options.n_new)
            cell_bytes = kv_bytes_per_token(vocab.metadata)
        model_bytes = files.model.stat().st_size
        lengths: dict[int, int] = {}
        for call in calls:
            lengths[call.context] = len(call.prompt) + len(call.answer)
        contexts_bytes = cell_bytes * sum(lengths.values())
        shared = int(options.share * (model_bytes + contexts_bytes))
        llama = self._llama(max(len(one.prompt) + max(len(one.answer), N_TIMED) for one in calls))
        systems = systems_of(files.left_out)
        self._begin("the pace of the whole model in vanilla llama.cpp", 2)
        pace = self._pace(files, llama, calls)
        self._begin("memory of the processes beside weights and contexts", 4)
        memories = self._memories(systems, files, llama, calls, shared)
        kept = {one.name for one in systems if one.keeps_contexts}
        n_whole = len(systems) - len(kept) + _KEPT * len(kept)
        seconds = [_MORE * n_whole * pace.seconds(call) for call in calls]
        opening_s = len(kept) * len(lengths) * max(map(pace.seconds, calls))
        n_last = self._n_last(seconds, opening_s)
        earlier = openings(calls, n_last)
        calls = [pace.promised(call) for call in calls[-n_last:]]
        what = f"{len(calls)} calls on {len(systems)} systems"
        self._begin(what, sum(seconds[-n_last:]) + (opening_s if earlier else 0))
        sides = [side_of(one, files, llama, self._folder, memories[one.name]) for one in systems]
        results, usage = self._results(sides, kept, earlier, calls)
        n_made = len(results[VANILLA])
        return Day(
            options=options,
            files=files,
            n_contexts=len({call.context for call in calls[:n_made]}),
            model_bytes=model_bytes,
            contexts_bytes=contexts_bytes,
            shared_bytes=shared,
            pace=pace,
            calls=calls[:n_made],
            results=results,
            usage=usage,
            budgets={name: memory.process for name, memory in memories.items()},
            seconds=time.monotonic() - self._started,
        )

    def _begin(self, what: str, seconds: float) -> None:
        self._step += 1
        self._say(f"step {self._step} of {self._n_steps}: {what}, about {duration_text(seconds)}")

    def _files(self) -> Prepared:
        options = self._options
        if options.model is None:
            return made_files(
                self._folder,
                options.threads,
                lambda name: self._begin(f"{name} the packaged model", _STEP_S[name]),
            )
        files = found_files(options.model, load_config(options.config, os.environ), options.threads)
        for name, reason in files.left_out.items():
            self._say(f"{name} is left out: {reason}.")
        return files

    def _llama(self, longest: int) -> dict[str, Any]:
        threads = self._options.threads
        return {
            "n_ctx": _ROUND_CTX * -(-(longest + 1) // _ROUND_CTX),
            "n_batch": _BATCH,
            "n_threads": threads,
            "n_threads_batch": threads,
            "flash_attn": True,
        }

    def _pace(self, files: Prepared, llama: dict[str, Any], calls: Sequence[Call]) -> Pace:
        longest = max((call.prompt for call in calls), key=len)
        lengths = sorted({min(n, len(longest)) for n in (32, 128, len(longest))})
        side = side_of(System("pace"), files, llama, self._folder / "pace", Memory.plenty())
        with worker_process("vanilla llama.cpp", serve, side, _THEN) as process:
            process.receive()
            pace: Pace = process.ask(("pace", longest, lengths))
            return pace

    def _memories(
        self,
        systems: Sequence[System],
        files: Prepared,
        llama: dict[str, Any],
        calls: Sequence[Call],
        shared: int,
    ) -> dict[str, Memory]:
        """Return each system's memory, from what its process takes without a limit."""
        n_weights = files.model.stat().st_size
        longest = max(calls, key=lambda call: len(call.prompt))
        memories = {one.name: Memory.of(shared, n_weights) for one in systems}
        limited = [one for one in systems if one.keeps_limit(shared, n_weights)]
        folder = self._folder / "unlimited"
        for wave in self._waves(limited, n_weights):
            with ExitStack() as stack:
                sides = [side_of(one, files, llama, folder, Memory.plenty()) for one in wave]
                for name, worker in _started(stack, sides).items():
                    worker.ask(("call", longest))
                    memories[name] = Memory.of(shared, n_weights, worker.ask(("usage",)))
        return memories

    def _n_last(self, seconds: Sequence[float], opening_s: float) -> int:
        """Return how many of the last calls are made, all if they fit into the time."""
        if self._options.n_calls is not None:
            return min(self._options.n_calls, len(seconds))
        return fitting(seconds, self._left_s() - opening_s, _LEAST_CALLS)

    def _left_s(self) -> float:
        return 60 * self._options.minutes - (time.monotonic() - self._started)

    def _results(
        self,
        sides: Sequence[Side],
        kept: Collection[str],
        earlier: Sequence[Call],
        calls: Sequence[Call],
    ) -> tuple[dict[str, list[Called]], dict[str, Usage]]:
        n_bytes = sides[0].model.stat().st_size
        rng = random.Random(self._options.seed)  # noqa: S311  an order, not a secret
        results: dict[str, list[Called]] = {side.name: [] for side in sides}
        usage: dict[str, Usage] = {}
        n_all = (len(earlier) + len(calls)) * len(sides)
        with progress_bar("calls", "call", n_all) as bar:
            for wave in self._waves(sides, n_bytes):
                with ExitStack() as stack:
                    workers = _started(stack, wave)
                    for call in earlier:  # contexts that apps have from before
                        for side in wave:
                            if side.name in kept or call is earlier[-1]:
                                workers[side.name].ask(("call", call))
                            bar.update(1)
                    for i, call in enumerate(calls):
                        if self._is_late(i, len(wave) == len(sides)):
                            break
                        for side in rng.sample(wave, len(wave)):
                            results[side.name].append(workers[side.name].ask(("call", call)))
                            bar.update(1)
                    for side in wave:
                        usage[side.name] = workers[side.name].ask(("usage",))
        return results, usage

    def _is_late(self, n_made: int, is_paired: bool) -> bool:
        """Return whether to stop, because calls take longer than planned."""
        is_asked = self._options.n_calls is not None
        return is_paired and not is_asked and n_made >= _LEAST_CALLS and self._left_s() < 0

    def _waves(self, systems: Sequence[Any], n_bytes: int) -> list[list[Any]]:
        """Return all systems at once if they fit into memory, else one after the other."""
        if len(systems) * (2 * n_bytes + _PROCESS_BYTES) <= available_bytes():
            return [list(systems)]
        if 2 * n_bytes + _PROCESS_BYTES > available_bytes():
            raise ConfigError(
                f"a system may take {size_text(2 * n_bytes + _PROCESS_BYTES)}, but "
                f"{size_text(available_bytes())} are available. {_THEN}"
            )
        return [[one] for one in systems]


def _started(stack: ExitStack, sides: Sequence[Side]) -> dict[str, WorkerProcess]:
    workers = {
        side.name: stack.enter_context(worker_process(f"system {side.name!r}", serve, side, _THEN))
        for side in sides
    }
    for worker in workers.values():
        worker.receive()
    return workers

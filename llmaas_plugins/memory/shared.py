"""The memory budget of the process: kept, and divided among the plugins' claims.

A thread looks twice a second at what the process takes, and at what the plugins say that memory is
worth (``llmaas_memory``). If the process exceeds the budget, or the system has less memory left,
memory is released at once. If another division saves more time, memory moves.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from llama_cpp import llama_cpp

from llmaas_hooks import (
    ConfigError,
    ContextCreate,
    MemoryClaim,
    ModelLoad,
    UnmetBudgetError,
    forks,
    hookimpl,
)
from llmaas_plugins import process_memory
from llmaas_plugins.failure_log import FailureLog
from llmaas_plugins.machine import resident_bytes
from llmaas_plugins.memory.division import divide, saved_s
from llmaas_plugins.model.cell_sizes import all_cell_bytes, n_ctx_of
from llmaas_plugins.sizes import memory_bytes

__all__ = ["SharedMemory"]

_log = logging.getLogger("llmaas.memory")

_EVERY_S = 0.5
_FEW = 20
"""Looks in a row for which memory may be short before that is told: a model that is loaded or that
computes a long batch gives memory back only afterwards."""
_PAUSE_S = 15.0
"""Least time until memory moves to somebody else: read-in weights and refilled contexts cost time,
too."""
_DIVIDE_S = 5.0
"""Time between two divisions, each of which takes milliseconds."""
_GAIN, _LEAST_GAIN_S = 1.1, 1e-3
"""A move must save so many times the time that it costs elsewhere, and so many more seconds a
second. It would otherwise follow noise."""
_SHOWN_MOVES = 8


class SharedMemory(forks.Forked):
    """Plugin that keeps the memory budget of the process and divides it.

    A look takes locks of the plugins, so a fork waits for it before it takes any of them.
    """

    comes_first = True

    def __init__(self, budget: int, claims: Callable[[], list[MemoryClaim]]) -> None:
        """Set the budget, and start to divide it with the first context.

        Args:
            budget: Memory of the process, in bytes.
            claims: Function that asks all plugins (``HookManager.memory``).
        """
        self._budget = budget
        self._claims = claims
        self._lock = forks.lock()
        self._moved_at = self._divided_at = -_PAUSE_S
        self._grown: set[str] = set()  # owners to whom memory moved last
        self._moves: deque[dict[str, Any]] = deque(maxlen=_SHOWN_MOVES)
        self._n_moves = 0
        self._failures = FailureLog(_log, logging.WARNING)
        self._n_short = 0
        self._why_unmet: str | None = None
        self._failed_claims = FailureLog(_log, logging.WARNING)
        self._ended: threading.Event | None = None
        self._in_force = min(budget, process_memory.obtainable_bytes())
        process_memory.add_keeper(self)
        process_memory.add_limit(self)
        forks.watch(self)

    def set_budget(self, budget: int | str) -> None:
        """Change the memory budget. It is met when this method returns.

        Args:
            budget: New budget, in bytes or as ``budget`` in the configuration.

        Raises:
            ConfigError: The budget is neither a size nor a share. Nothing was changed.
            UnmetBudgetError: The budget cannot be met. The old one is in force again.
        """
        try:
            n_bytes = memory_bytes(budget)
        except ValueError as error:
            raise ConfigError(f"the memory budget: {error}, found {budget!r}") from error
        with self._lock:
            old, self._budget = self._budget, n_bytes
            try:
                self._obey(waits=True)
            except BaseException:  # also Ctrl-C
                self._budget = old
                with contextlib.suppress(UnmetBudgetError):
                    self._obey(waits=True)
                raise

    @property
    def in_force(self) -> int:
        """Bytes that the process may take now."""
        return self._in_force

    # -- limit of the process -------------------------------------------------------------------

    held_bytes = 0

    def room(self) -> int | None:
        """Return the bytes that others may take; None if a keeper of weights tells it instead."""
        if process_memory.has_other_limits(self):
            return None
        taken = resident_bytes() + process_memory.promised()
        return self._in_force - process_memory.SPARE_BYTES - taken

    def refresh(self) -> None:
        """Do nothing: the process is asked each time."""

    def enforce(self, *, waits: bool) -> None:
        """Do nothing: those who may give memory back are asked elsewhere."""
        del waits

    def grant(self, n_bytes: int) -> int:
        """Return how many of ``n_bytes`` may be taken."""
        room = self.room()
        return n_bytes if room is None else max(0, min(n_bytes, room))

    # -- hooks ----------------------------------------------------------------------------------

    @hookimpl
    def llmaas_model_load(self, load: ModelLoad) -> None:
        """Read the weights, where llama.cpp would map the file and then also hold them repacked."""
        load.params.load_mode = llama_cpp.LLAMA_LOAD_MODE_NONE

    @hookimpl
    def llmaas_context_create(self, create: ContextCreate) -> None:
        """Refuse a context that does not fit into the budget with its model.

        Streamed models are checked by the plugin that streams them.
        """
        self._start()
        is_streamed = create.load is not None and create.load.is_claimed
        if not (is_streamed and process_memory.has_other_limits(self)):
            self._require(create)

    @hookimpl
    def llmaas_status(self) -> dict[str, Any]:
        """Report the budget and the last moves; ``memory.owners`` reports who has which memory."""
        return {
            "budget": self._budget,
            "in_force": self._in_force,
            "unmet": self._why_unmet,
            "resident_bytes": resident_bytes(),
            "moves": self._n_moves,
            "last_moves": list(self._moves),
        }

    @hookimpl
    def llmaas_shutdown(self) -> None:
        """Limit the process no longer."""
        self._stop()
        process_memory.remove_limit(self)
        process_memory.remove_keeper(self)

    # -- thread ---------------------------------------------------------------------------------

    def before_fork(self) -> None:
        """Wait until no look is going on."""
        self._lock.acquire()

    def after_fork(self, *, in_child: bool) -> None:
        """Continue; a child starts its own thread."""
        is_running = self._ended is not None and not self._ended.is_set()
        self._lock.release()
        if in_child and is_running:
            self._ended = None
            self._start()

    def _start(self) -> None:
        with self._lock:
            if self._ended is not None:
                return
            self._ended = threading.Event()
            arguments = weakref.ref(self), self._ended
            threading.Thread(
                target=_watch, args=arguments, name="llmaas-memory", daemon=True
            ).start()

    def _stop(self) -> None:
        ended = self._ended  # without the lock: a fork holds it, and may wait for who stops this
        if ended is not None:
            ended.set()

    def look(self) -> None:
        """Obey the budget, and move memory if that saves time."""
        with self._lock:
            if self._ended is None or self._ended.is_set():
                return
            try:
                claims = self._obey(waits=False)
                self._divide(claims)
            except Exception as error:  # a full disk, an unmet budget: the next look tries again
                self._n_short += 1
                if self._n_short > _FEW:
                    self._failures.failed("the memory budget: %s", error)
                    self._why_unmet = str(error)
            else:
                self._n_short, self._why_unmet = 0, None
                self._failures.worked()

    # -- division -------------------------------------------------------------------------------

    def _obey(self, *, waits: bool) -> list[MemoryClaim]:
        """Release what exceeds the budget or what the system can give; return movable claims.

        Args:
            waits: Whether to wait for models that compute. If not, they release memory when their
                batch ends.

        Raises:
            UnmetBudgetError: Too little can be released.
        """
        self._in_force = min(self._budget, process_memory.obtainable_bytes())
        if waits:
            process_memory.refresh()
        room = process_memory.room() or 0
        if room < 0 and waits and -room > process_memory.releasable():
            raise self._unmet(self._in_force - room, "what the process needs", -room)
        if room < 0:
            process_memory.release(-room)
            room = process_memory.room() or 0
        if waits or resident_bytes() > self._in_force - process_memory.SPARE_BYTES:
            process_memory.enforce(waits=waits)
        if room < 0:
            raise self._unmet(self._in_force - room, "what the process needs", -room)
        return self._movable()

    def _movable(self) -> list[MemoryClaim]:
        return [claim for claim in self._claims() if claim.resize is not None]

    def _divide(self, claims: Sequence[MemoryClaim]) -> None:
        room, now = process_memory.room(), time.monotonic()
        if room is None or now - self._divided_at < _DIVIDE_S:
            return
        self._divided_at = now
        held = [claim.held for claim in claims]
        wanted = divide(room + process_memory.releasable(), claims)
        changes = [
            saved_s(claim, size) - saved_s(claim, was)
            for claim, was, size in zip(claims, held, wanted, strict=True)
        ]
        sizes = [one for one in zip(claims, held, wanted, strict=True) if one[1] != one[2]]
        if all(size > was for _, was, size in sizes):  # there is memory that nobody had
            for claim, _, size in sizes:
                self._resize(claim, size)
            return
        gain_s = sum(max(0.0, change) for change in changes)
        loss_s = -sum(min(0.0, change) for change in changes)
        grown = {claim.owner for claim, was, size in sizes if size > was}
        is_pause = now - self._moved_at < _PAUSE_S and not grown <= self._grown
        if is_pause or gain_s < _GAIN * loss_s + _LEAST_GAIN_S:
            return
        self._moved_at, self._grown = now, grown
        self._n_moves += 1
        move = {claim.owner: [was, size] for claim, was, size in sizes}
        self._moves.append({"at": time.time(), "bytes": move, "saved_s": gain_s - loss_s})
        _log.info("memory moves to save %.1f %% of the time: %s", 100 * (gain_s - loss_s), move)
        is_released = True
        for claim, was, size in sorted(sizes, key=lambda one: one[2] - one[1]):  # release first
            if size < was or is_released:
                is_released &= self._resize(claim, size)

    def _resize(self, claim: MemoryClaim, n_bytes: int) -> bool:
        """Resize a claim that can move; return whether that worked.

        A claim that fails must not keep others from being resized, but none may grow then.
        """
        assert claim.resize is not None
        try:
            claim.resize(n_bytes)
        except Exception as error:
            self._failed_claims.failed("%s cannot be resized: %s", claim.owner, error)
            return False
        return True

    def _require(self, create: ContextCreate) -> None:
        process = max(resident_bytes(), llama_cpp.llama_model_size(create.model))
        needed = process + process_memory.promised() + all_cell_bytes(create)
        missing = needed + process_memory.SPARE_BYTES - self._in_force
        if 0 < missing <= process_memory.releasable():
            missing -= process_memory.release(missing)
        if missing > 0:
            what = f"the process with its model and a context of {n_ctx_of(create)} tokens"
            raise self._unmet(self._in_force + missing, what, missing)

    def _unmet(self, least: int, what: str, missing: int) -> UnmetBudgetError:
        reason = "" if self._in_force == self._budget else ", all that the system can give now,"
        return UnmetBudgetError(
            f"a memory budget of {self._in_force >> 20} MiB{reason} cannot be met, because {what} "
            f"takes more; expected {-(-least >> 20)} MiB or more. A shorter context needs less, "
            "and the plugin flash_weights streams weights that do not fit.",
            missing,
        )


def _watch(reference: weakref.ref[SharedMemory], ended: threading.Event) -> None:
    """Look from time to time, until the plugin ends or nobody has it."""
    while not ended.wait(_EVERY_S):
        one = reference()
        if one is None:
            return
        one.look()
        del one

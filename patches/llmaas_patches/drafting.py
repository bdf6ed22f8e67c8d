"""Plugins' drafts: the one draft model of ``Llama`` that all of them share.

``Llama.generate`` asks its draft model for tokens after each sampled token, and evaluates them
together with it. A drafted token is kept if the token that is then sampled is the same one, so the
text is distributed as without drafts.
"""

from __future__ import annotations

import math
import operator
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from llama_cpp import Llama, llama_cpp
from llama_cpp.llama_speculative import LlamaDraftModel
from numpy.ctypeslib import as_array
from numpy.typing import NDArray

from llmaas_hooks import Drafter, LlmaasError, PluginError, Proposal, Request
from llmaas_hooks.drafts import Pick
from llmaas_patches.engine import LlamaEngine
from llmaas_patches.host import Host

__all__ = ["BatchTimes", "Drafting", "drafting_of"]

_HOOK = "llmaas_draft"
_NO_TOKENS = np.empty(0, dtype=np.intc)
_N_TIMES = 8
"""Batches of a size whose median time counts."""
_APP = 0
_FULL = 1
"""Status of ``llama_decode`` if there is no room for a batch."""


class BatchTimes:
    """Time that small batches of an engine take, by level and by number of tokens."""

    def __init__(self) -> None:
        """Start without times."""
        self._all: dict[tuple[int, int], deque[float]] = {}
        self._medians: dict[int, dict[int, float]] = {}

    def add(self, level: int, n_tokens: int, seconds: float) -> None:
        """Record a batch."""
        times = self._all.setdefault((level, n_tokens), deque(maxlen=_N_TIMES))
        times.append(seconds)
        self._medians.setdefault(level, {})[n_tokens] = sorted(times)[len(times) // 2]

    def seconds(self, level: int) -> Mapping[int, float]:
        """Return the median of each size's last times."""
        return self._medians.get(level, {})


class Drafting(LlamaDraftModel):  # type: ignore[misc, unused-ignore]
    """Draft model of one request, which makes the most promising of its drafters' drafts."""

    def __init__(self, host: Host, engine: LlamaEngine, times: BatchTimes) -> None:
        """Start without drafters."""
        self._host, self._engine, self._times = host, engine, times
        self._drafters: dict[str, Drafter] = {}
        self._most = 0
        self._is_detached = False

    def offer(self, drafters: Mapping[str, Drafter]) -> None:
        """Add drafters, by plugin."""
        for plugin, drafter in drafters.items():
            try:
                self._most = max(self._most, operator.index(drafter.most))
                self._drafters[plugin] = drafter
            except Exception as error:
                self._failed(plugin, error)

    def attach(self) -> None:
        """Make this the engine's draft model, unless there is none to ask or another one."""
        self._is_detached = False
        llama = self._engine.llama
        if self._drafters and llama.draft_model is None:
            self._engine.keep_rows(_may_propose(llama, self._most))
            llama.draft_model = self

    def detach(self) -> None:
        """Leave the engine without a draft model."""
        self._is_detached = True
        if self._engine.is_alive and self._engine.llama.draft_model is self:
            self._engine.llama.draft_model = None

    def evaluated(self, n_tokens: int, seconds: float) -> None:
        """Record the time of one of ``Llama``'s batches."""
        if n_tokens <= self._most + 1:
            self._times.add(self._host.level(self._engine.ctx), n_tokens, seconds)

    def __call__(self, input_ids: NDArray[np.intc], /, **_: Any) -> NDArray[np.intc]:
        """Return the best draft to follow ``input_ids``; none if none pays, or one fails.

        Raises:
            LlmaasError: Another thread began a request on the engine meanwhile.
        """
        engine = self._engine
        llama = engine.llama
        room = min(llama.n_ctx(), len(llama.input_ids)) - len(input_ids)
        room = min(room, self._most, llama.n_batch - 1)  # the logits of one batch are kept
        if room <= 0 or self._host.hooks.is_ending:
            return _NO_TOKENS
        found = self._proposals(input_ids.astype(np.int32, copy=False))
        plugin, best = max(found.items(), key=lambda one: one[1].gain, default=("", None))
        if best is None:
            return _NO_TOKENS
        try:
            return self._checked(best.make()[:room])
        except Exception as error:
            if self._is_taken:
                raise LlmaasError(
                    "another request began on this Llama while one was being served: a Llama "
                    "serves one request at a time, so let threads take turns"
                ) from error
            self._failed(plugin, error)
            return _NO_TOKENS

    def guess(self, level: int, most: int, pick: Pick) -> list[int]:
        """Return tokens that the engine says at a level (``llmaas_hooks.Guess``)."""
        host, engine = self._host, self._engine
        llama, tracker = engine.llama, host.trackers.get(engine.ctx)
        n_past = int(llama.n_tokens)
        if host.native is None or tracker is None or engine.n_explained != n_past:
            return []
        with host.call(tracker), engine.lent(), host.native.unobserved(engine.ctx, level):
            engine.settle()
            batch = llama_cpp.llama_batch_init(1, 0, 1)
            try:
                return self._say(batch, int(llama.input_ids[n_past]), n_past, most, pick)
            finally:
                llama_cpp.llama_batch_free(batch)
                if not self._is_taken:  # else the cells are another request's
                    memory = llama_cpp.llama_get_memory(engine.ctx)
                    llama_cpp.llama_memory_seq_rm(memory, _APP, n_past, -1)

    # -- inside ---------------------------------------------------------------------------------

    @property
    def _is_taken(self) -> bool:
        """Whether a thread that did not wait began another request on the engine meanwhile."""
        return self._is_detached and self._engine.is_alive

    def _proposals(self, tokens: NDArray[np.int32]) -> dict[str, Proposal]:
        seconds, found = self._times.seconds(self._host.level(self._engine.ctx)), {}
        for plugin, drafter in list(self._drafters.items()):
            try:
                proposal = drafter.propose(tokens, seconds)
                if proposal is not None and _number(proposal.gain) > 1:
                    found[plugin] = proposal
            except Exception as error:
                self._failed(plugin, error)
        return found

    def _checked(self, tokens: Sequence[int]) -> NDArray[np.intc]:
        """Return a draft's tokens.

        Raises:
            ValueError: They are no tokens of the model.
        """
        found, n_vocab = np.array(tokens, dtype=np.intc), self._engine.llama.n_vocab()
        if found.ndim != 1 or np.any((found < 0) | (found >= n_vocab)):
            raise ValueError(f"the draft is {tokens!r}; expected tokens below {n_vocab}")
        return found

    def _failed(self, plugin: str, error: Exception) -> None:
        """Ask a drafter that failed no more."""
        self._drafters.pop(plugin, None)
        self._host.hooks.handle(PluginError(plugin, _HOOK, error))

    def _say(self, batch: Any, token: int, n_past: int, most: int, pick: Pick) -> list[int]:
        """Evaluate ``token`` at position ``n_past``, and then the tokens that it leads to."""
        tokens: list[int] = []
        goes_on = most > 0
        while goes_on and self._decode(batch, token, n_past + len(tokens)):
            token, goes_on = pick(self._logits())
            tokens.append(token)
            goes_on = goes_on and len(tokens) < most
        return tokens

    def _decode(self, batch: Any, token: int, position: int) -> bool:
        """Evaluate a token without any hook; return whether there was room for it."""
        batch.n_tokens, batch.n_seq_id[0], batch.seq_id[0][0] = 1, 1, _APP
        batch.token[0], batch.pos[0], batch.logits[0] = token, position, True
        status = self._host.real_decode(self._engine.ctx, batch)
        if status not in (0, _FULL):
            raise RuntimeError(f"llama_decode returned {status}")
        return bool(status == 0)

    def _logits(self) -> NDArray[np.float32]:
        row = llama_cpp.llama_get_logits_ith(self._engine.ctx, -1)
        return as_array(row, shape=(self._engine.llama.n_vocab(),))


def drafting_of(host: Host, engine: LlamaEngine, request: Request) -> Drafting | None:
    """Return the plugins' drafts for a request, or None if there are none."""
    if engine.app_drafts or request.reads_tokens or engine.needs_all_logits:
        return None
    if not host.hooks.listens(_HOOK) or not engine.can_drop_tokens:
        return None
    drafting = Drafting(host, engine, host.batch_times.setdefault(engine, BatchTimes()))
    drafting.offer(host.hooks.draft(request, drafting.guess))
    return drafting


def _number(gain: float) -> float:
    if math.isnan(gain):
        raise ValueError("the gain of a draft is nan; expected a number")
    return gain


def _may_propose(llama: Llama, most: int) -> Callable[[int], bool]:
    """Return a function of a batch's size: whether the batch may contain drafts.

    The function does not keep the engine alive, nor drafts that were detached from it.
    """
    engine = weakref.ref(llama)

    def may_propose(n_tokens: int) -> bool:
        is_ours = isinstance(getattr(engine(), "draft_model", None), Drafting)
        return is_ours and n_tokens <= most + 1

    return may_propose

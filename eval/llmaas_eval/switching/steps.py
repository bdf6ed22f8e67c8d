"""A trace as steps: the tokens of each context before and after every call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from llmaas_eval.traces import TraceCall
from llmaas_hooks import Tokens

__all__ = ["Replay", "Step", "replay_of"]

_LOW, _HIGH = 300, 4000
"""Range of the token ids, which are ordinary tokens of every vocabulary."""


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One call of one context.

    Attributes:
        time_s: Arrival time in seconds.
        context: Number of the context.
        before: Tokens of the context before the call, shape ``(n,)``.
        after: Tokens of the context when the call returns, shape ``(m,)``. They continue
            ``before``, unless the call did not fit: then the window slid.
        n_prompt: Number of new tokens to evaluate before the reply's first token.
        n_reply: Number of tokens in the reply; the last ``n_prompt + n_reply`` of ``after`` are
            new.
        window: How often the context's window has slid by the end of this call.
        slides: Whether the window slides in this call.
    """

    time_s: float
    context: int
    before: Tokens
    after: Tokens
    n_prompt: int
    n_reply: int
    window: int
    slides: bool

    @property
    def prompt(self) -> Tokens:
        """Tokens of the context when its reply begins."""
        return self.after[: len(self.after) - self.n_reply]

    @property
    def n_most(self) -> int:
        """Highest number of cells that the call needs at once."""
        return max(len(self.before), len(self.after))


@dataclass(slots=True)
class _Context:
    rng: np.random.Generator
    tokens: Tokens = field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    window: int = 0


@dataclass(frozen=True, slots=True)
class Replay:
    """Calls of a replay.

    Attributes:
        fills: Calls that bring every context that was called before to its length, least recently
            used first.
        steps: Calls to measure.
    """

    fills: Sequence[Step]
    steps: Sequence[Step]

    @property
    def peak_tokens(self) -> int:
        """Number of tokens of all contexts, each at its longest."""
        longest: dict[int, int] = {}
        for step in [*self.fills, *self.steps]:
            longest[step.context] = max(longest.get(step.context, 0), step.n_most)
        return sum(longest.values())


def replay_of(calls: Sequence[TraceCall], max_tokens: int, n_calls: int | None = None) -> Replay:
    """Return the replay of the last ``n_calls`` calls of a trace, or of all.

    A call that does not fit a context of ``max_tokens`` slides its window (LLMS §4): the older half
    is dropped, or more if the call needs it. The kept tokens move to other positions, so their
    cells are new content to every system. The service cannot foresee the slide, so it loads all
    tokens.
    """
    n_skipped = 0 if n_calls is None else max(0, len(calls) - n_calls)
    contexts: dict[int, _Context] = {}
    last: dict[int, Step] = {}
    for call in calls[:n_skipped]:
        last.pop(call.context, None)
        last[call.context] = _step(contexts, call, max_tokens)
    fills = [_fill(step) for step in last.values()]
    return Replay(fills, [_step(contexts, call, max_tokens) for call in calls[n_skipped:]])


def _step(contexts: dict[int, _Context], call: TraceCall, max_tokens: int) -> Step:
    if call.context not in contexts:
        contexts[call.context] = _Context(np.random.default_rng([1, call.context]))
    context = contexts[call.context]
    n_new = min(call.n_delta, max_tokens)
    n_reply = min(call.n_reply, n_new)
    before, kept = context.tokens, context.tokens
    slides = len(before) + n_new > max_tokens
    if slides:
        n_kept = min(max_tokens // 2, max_tokens - n_new)
        kept = before[len(before) - n_kept :]
        context.window += 1
    new = context.rng.integers(_LOW, _HIGH, n_new, dtype=np.int32)
    context.tokens = np.concatenate([kept, new])
    return Step(
        call.time_s, call.context, before, context.tokens,
        n_new - n_reply, n_reply, context.window, slides,
    )  # fmt: skip


def _fill(last: Step) -> Step:
    nothing = np.zeros(0, dtype=np.int32)
    n_new = len(last.after)
    return Step(
        last.time_s, last.context, nothing, last.after, n_new - 1, 1, last.window, slides=False
    )

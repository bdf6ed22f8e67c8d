"""Drafts of tokens from stored conversations, through llama-cpp-python's draft interface.

The model evaluates the proposed tokens in one batch and keeps those that it would have produced
itself. The text stays the same; only the time changes. A batch of many tokens takes longer than a
single token, on a CPU almost in proportion, so wrong proposals are expensive.

For a few batch sizes, the draft therefore estimates the accepted tokens from past continuations of
the context's end, and from how often such predictions came true. It proposes the batch with the
most tokens for its time, or nothing if a single token is as good.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping
from itertools import accumulate
from operator import mul
from typing import Any, NamedTuple

import numpy as np
from llama_cpp.llama_speculative import LlamaDraftModel
from numpy.typing import NDArray

from llmaas_hooks import Proposal
from llmaas_plugins.knn_lm.drafts.continuation import AcceptanceRates, Continuation, continue_match
from llmaas_plugins.knn_lm.drafts.suffix_array import (
    LONGEST,
    NO_MATCH,
    SuffixIndex,
    SuffixMatch,
    match_within,
)

__all__ = ["BATCH_COSTS", "DatastoreDraft", "DraftCounts"]

BATCH_COSTS = {1: 1.0, 4: 2.75, 8: 5.3, 16: 7.6}
"""Cost of a batch by its number of tokens, in single-token batches, if nothing was measured.

Measured on one core with AVX-512 and a 1 B-shape model in Q4_0. A size between two of these costs
as much as the larger one, because kernels process rows in groups of four and sixteen.
"""
_LEAST_FOLLOWED = 4
"""Match length, halved at each deviation, below which a followed place is given up."""
_NO_TOKENS = np.empty(0, dtype=np.intc)
_RECENT_SHARE = 8
"""Recent tokens are re-sorted at each update until they exceed 1/8 of the stored ones."""


class DraftCounts(NamedTuple):
    """Outcome of the proposals.

    Attributes:
        passes: Batches whose outcome was observed, with or without a proposal.
        proposed: Tokens proposed in these batches, padding included.
        accepted: Proposed tokens that the model kept.
    """

    passes: int = 0
    proposed: int = 0
    accepted: int = 0


class DatastoreDraft(LlamaDraftModel):  # type: ignore[misc, unused-ignore]
    """A draft model that proposes continuations found in stored conversations or in this text.

    A draft belongs to one ``Llama``, whose ``n_batch`` must hold the largest batch in ``costs``.
    Do not use it with recurrent or hybrid models: they cannot remove wrongly proposed tokens, and
    llama-cpp-python does not notice.

    Attributes:
        costs: Batch costs, initially the given ones; replacements must not have larger batches.
        n_ctx: Tokens that fit in a context.
        counts: Outcome of the proposals so far.
    """

    def __init__(
        self,
        sequences: Iterable[NDArray[np.integer[Any]]],
        *,
        costs: Mapping[int, float] = BATCH_COSTS,
    ) -> None:
        """Index the stored conversations.

        Args:
            sequences: Tokens of each stored conversation.
            costs: Cost of a batch by its size, in single-token batches, for the sizes worth using.
        """
        self._stored, self._recent = SuffixIndex(sequences), SuffixIndex([])
        self._rates = (AcceptanceRates(), AcceptanceRates(), AcceptanceRates())
        self._followed = _Followed(self._stored, NO_MATCH)
        self.costs = dict(costs)
        self.n_ctx = sys.maxsize
        self.counts = DraftCounts()
        self._context: NDArray[np.intc] = _NO_TOKENS
        self._continuations: list[Continuation] = []
        self._n_proposed = 0

    @property
    def n_bytes(self) -> int:
        """Bytes of memory that the index takes."""
        return self._stored.n_bytes + self._recent.n_bytes

    def update(self, tokens: NDArray[np.integer[Any]]) -> None:
        """Add one conversation to the index."""
        recent = SuffixIndex([*self._recent.sequences(), tokens])
        if len(recent) * _RECENT_SHARE > len(self._stored):
            merged = SuffixIndex([*self._stored.sequences(), *recent.sequences()])
            self._stored, recent = merged, SuffixIndex([])
        self._recent = recent

    def begin(self) -> None:
        """Take the next text for another one, whatever it begins with."""
        self._context = _NO_TOKENS

    @property
    def most(self) -> int:
        """Most tokens of a draft."""
        return max(self.costs) - 1

    def __call__(self, input_ids: NDArray[np.intc], /, **_: Any) -> NDArray[np.intc]:
        """Propose tokens to follow ``input_ids``: none, or a whole batch less one token."""
        proposal = self.propose(input_ids, {})
        return _NO_TOKENS if proposal is None else np.array(proposal.make(), dtype=np.intc)

    def propose(self, tokens: NDArray[Any], seconds: Mapping[int, float]) -> Proposal | None:
        """Return the best draft to follow a text, or None if a single token is as good.

        Args:
            tokens: The text.
            seconds: Measured times of batches by size, which count if ``costs`` are higher.
        """
        room = self.n_ctx - len(tokens)
        if room <= 0:
            return None
        self._continue(tokens)
        gain, best = self._best(self._measured(seconds))
        self._context, self._n_proposed = tokens.copy(), 0

        def make() -> list[int]:
            self._n_proposed = min(len(best), room)
            return best[:room]

        return Proposal(gain, make) if best else None

    def _measured(self, seconds: Mapping[int, float]) -> Mapping[int, float]:
        """Return the cost of each size of batch, as measured if that is less.

        Where weights are streamed, a batch costs hardly more than a token. A higher cost may be
        another program's doing, and would not be measured again.
        """
        if 1 not in seconds:
            return self.costs
        return {
            size: min(cost, seconds.get(size, math.inf) / seconds[1])
            for size, cost in self.costs.items()
        }

    def _continue(self, input_ids: NDArray[Any]) -> None:
        """Learn from the new tokens, and find continuations of the text."""
        new_tokens = self._new_tokens(input_ids)
        for continuation, rates in zip(self._continuations, self._rates, strict=False):
            rates.learn(continuation, new_tokens)
        matches = self._matches(input_ids, new_tokens)
        self._continuations = [
            continue_match(match, rates) for match, rates in zip(matches, self._rates, strict=True)
        ]

    def _matches(
        self, input_ids: NDArray[Any], new_tokens: list[int]
    ) -> tuple[SuffixMatch, SuffixMatch, SuffixMatch]:
        """Match the context in stored texts, in itself, and along the place it last followed."""
        n_ahead = max(self.costs) - 1
        stored, index = max(
            ((index.match(input_ids, n_ahead), index) for index in (self._stored, self._recent)),
            key=lambda found: found[0].length,
        )
        followed = self._followed.after(new_tokens, n_ahead) if new_tokens else NO_MATCH
        if stored.length >= followed.length or followed.length < _LEAST_FOLLOWED:
            self._followed, followed = _Followed(index, stored), NO_MATCH
        else:
            self._followed = _Followed(self._followed.texts, followed)
        return stored, match_within(input_ids, n_ahead), followed

    def _best(self, costs: Mapping[int, float]) -> tuple[float, list[int]]:
        """Return the batch with the most expected tokens for its time: its gain, and its draft.

        The draft is padded; it is empty if a single token is as good.
        """
        best, gain = list[int](), 1.0
        for continuation in self._continuations:
            expected = list(accumulate(accumulate(continuation.chances, mul), initial=1.0))
            for size, cost in costs.items():
                n_tokens = min(size, len(expected))
                if n_tokens > 1 and expected[n_tokens - 1] / cost > gain:
                    gain = expected[n_tokens - 1] / cost
                    tokens = continuation.tokens[: size - 1]
                    best = tokens + tokens[-1:] * (size - 1 - len(tokens))
        return gain, best

    def _new_tokens(self, input_ids: NDArray[Any]) -> list[int]:
        """Return the tokens added since the last call, or an empty list if this is another text."""
        n, n_proposed = len(self._context), self._n_proposed
        n_new = len(input_ids) - n
        is_longer = n > 0 and 0 < n_new <= max(self.costs)  # another drafter's may be among them
        if not is_longer or not np.array_equal(input_ids[:n], self._context):
            return []
        passes, proposed, accepted = self.counts
        n_accepted = min(n_new - 1, n_proposed)
        self.counts = DraftCounts(passes + 1, proposed + n_proposed, accepted + n_accepted)
        return input_ids[n:].tolist()


class _Followed(NamedTuple):
    """Place in a stored text that the context has been following."""

    texts: SuffixIndex
    match: SuffixMatch

    def after(self, new_tokens: list[int], n_ahead: int) -> SuffixMatch:
        """Move the place by the new tokens; halve the match's length if the stored text differs."""
        n = len(new_tokens)
        agrees = self.texts.row(self.match.start, n) == new_tokens
        length = min(self.match.length + n, LONGEST) if agrees else self.match.length // 2
        start = self.match.start - n
        return SuffixMatch(length, [self.texts.row(start, n_ahead)], start)

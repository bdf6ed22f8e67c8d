"""Tokens proposed from stored conversations, through llama-cpp-python's draft interface.

The model evaluates what is proposed in one batch and keeps what it would have said itself, so its
text stays its own; only the time changes. A batch of many tokens takes longer than one token,
though, and on a CPU nearly in proportion: wrong proposals cost. So for each of a few batch sizes
the tokens that it would bring are expected from what followed the context's end in the past, and
from how often that came true before. A proposal fills the batch that brings most for its time; none
is made if a single token does.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from itertools import accumulate
from operator import mul
from typing import Any, NamedTuple

import numpy as np
from llama_cpp.llama_speculative import LlamaDraftModel
from numpy.typing import NDArray

from llmaas_plugins.knn_lm.chains import Chain, Trust, chain_of
from llmaas_plugins.knn_lm.suffixes import LONGEST, NO_MATCH, Match, SuffixIndex, match_within

__all__ = ["BATCH_COSTS", "DatastoreDraft", "DraftCounts"]

BATCH_COSTS = {1: 1.0, 4: 2.75, 8: 5.3, 16: 7.6}
"""What a batch of so many tokens costs, in single tokens, if nothing else is known.

Measured on one core with AVX-512 and a 1 B-shape model in Q4_0. Sizes between these are no cheaper
than the next one: kernels take rows by four and by sixteen.
"""
_LEAST_FOLLOWED = 4
"""Length, halved by each deviation, below which a place in a stored text is given up."""
_NO_TOKENS = np.empty(0, dtype=np.intc)
_RECENT_SHARE = 8
"""Tokens that came later are sorted anew with each text, until they are this part of all."""


class DraftCounts(NamedTuple):
    """What became of the proposals.

    Attributes:
        passes: Batches whose outcome was seen, with a proposal or without.
        proposed: Tokens proposed in these, padding included.
        accepted: How many of them the model kept.
    """

    passes: int = 0
    proposed: int = 0
    accepted: int = 0


class DatastoreDraft(LlamaDraftModel):  # type: ignore[misc, unused-ignore]
    """Proposes what followed the same words in stored conversations, or earlier in this text.

    One belongs to one ``Llama``, whose ``n_batch`` must hold the largest batch in ``costs``. Give
    it as ``Llama(..., draft_model=..., logits_all=True)``, or better put it on an engine by
    ``llmaas_plugins.knn_lm.drafting.attach``. Not for recurrent or hybrid models: they cannot
    take back what was proposed wrongly, and llama-cpp-python does not notice.

    Attributes:
        costs: As given; others may take their place, with no larger batches.
        n_ctx: Tokens that a context has room for; ``attach`` finds out.
        counts: What became of the proposals so far.
    """

    def __init__(
        self,
        sequences: Iterable[NDArray[np.integer[Any]]],
        *,
        costs: Mapping[int, float] = BATCH_COSTS,
    ) -> None:
        """Index what is stored.

        Args:
            sequences: Tokens of each stored conversation.
            costs: For the batch sizes that pay, what one costs in batches of a single token, as
                ``drafting.measured_costs`` finds for an engine.
        """
        self._stored, self._recent = SuffixIndex(sequences), SuffixIndex([])
        self._trusts = (Trust(), Trust(), Trust())
        self._followed = _Followed(self._stored, NO_MATCH)
        self.costs = dict(costs)
        self.n_ctx = sys.maxsize
        self.counts = DraftCounts()
        self._context: NDArray[np.intc] = _NO_TOKENS
        self._chains: list[Chain] = []
        self._n_proposed = 0

    @property
    def n_bytes(self) -> int:
        """Memory of the index."""
        return self._stored.n_bytes + self._recent.n_bytes

    def update(self, tokens: NDArray[np.integer[Any]]) -> None:
        """Store one more conversation."""
        recent = SuffixIndex([*self._recent.sequences(), tokens])
        if len(recent) * _RECENT_SHARE > len(self._stored):
            merged = SuffixIndex([*self._stored.sequences(), *recent.sequences()])
            self._stored, recent = merged, SuffixIndex([])
        self._recent = recent

    def __call__(self, input_ids: NDArray[np.intc], /, **_: Any) -> NDArray[np.intc]:
        """Propose what may follow ``input_ids``: nothing, or a whole batch less one token."""
        room = self.n_ctx - len(input_ids)
        if room <= 0:
            return _NO_TOKENS
        said = self._said(input_ids)
        for chain, trust in zip(self._chains, self._trusts, strict=False):
            trust.learn(chain, said)
        matches = self._matches(input_ids, said)
        self._chains = [
            chain_of(match, trust) for match, trust in zip(matches, self._trusts, strict=True)
        ]
        tokens = self._best()[:room]
        self._context, self._n_proposed = input_ids.copy(), len(tokens)
        return np.array(tokens, dtype=np.intc)

    def _matches(self, input_ids: NDArray[np.intc], said: list[int]) -> tuple[Match, Match, Match]:
        """In stored texts, in this one, and where it was in a stored text before it deviated."""
        n_ahead = max(self.costs) - 1
        stored, index = max(
            ((index.match(input_ids, n_ahead), index) for index in (self._stored, self._recent)),
            key=lambda found: found[0].length,
        )
        followed = self._followed.after(said, n_ahead) if said else NO_MATCH
        if stored.length >= followed.length or followed.length < _LEAST_FOLLOWED:
            self._followed, followed = _Followed(index, stored), NO_MATCH
        else:
            self._followed = _Followed(self._followed.texts, followed)
        return stored, match_within(input_ids, n_ahead), followed

    def _best(self) -> list[int]:
        """The tokens of the batch that brings most for its time, padded to its size."""
        best, gain = [], 1.0
        for chain in self._chains:
            expected = list(accumulate(accumulate(chain.chances, mul), initial=1.0))
            for size, cost in self.costs.items():
                n_tokens = min(size, len(expected))
                if n_tokens > 1 and expected[n_tokens - 1] / cost > gain:
                    gain = expected[n_tokens - 1] / cost
                    tokens = chain.tokens[: size - 1]
                    best = tokens + tokens[-1:] * (size - 1 - len(tokens))
        return best

    def _said(self, input_ids: NDArray[np.intc]) -> list[int]:
        """What the model said since the last call; nothing if this is another text."""
        n, n_proposed = len(self._context), self._n_proposed
        n_said = len(input_ids) - n
        is_longer = n > 0 and 0 < n_said <= n_proposed + 1
        if not is_longer or not np.array_equal(input_ids[:n], self._context):
            return []
        passes, proposed, accepted = self.counts
        self.counts = DraftCounts(passes + 1, proposed + n_proposed, accepted + n_said - 1)
        return input_ids[n:].tolist()


class _Followed(NamedTuple):
    """The place in a stored text that the context came along."""

    texts: SuffixIndex
    match: Match

    def after(self, said: list[int], n_ahead: int) -> Match:
        """The place ``said`` further on, as if they had stood there; if not, less is known."""
        n = len(said)
        agrees = self.texts.row(self.match.start, n) == said
        length = min(self.match.length + n, LONGEST) if agrees else self.match.length // 2
        start = self.match.start - n
        return Match(length, [self.texts.row(start, n_ahead)], start)

"""Mixing of one context's logits with the datastore's predictions."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from llama_cpp import llama_cpp
from numpy.ctypeslib import as_array

from llmaas_hooks import LogitsView, NativeContext, StoreError, Tokens
from llmaas_hooks.native import States
from llmaas_plugins._native import logits_mix, logits_peek
from llmaas_plugins.knn_lm.config import KnnLMConfig
from llmaas_plugins.knn_lm.datastore.datastore import Datastore, Neighbors
from llmaas_plugins.knn_lm.mixing.judgment import Bets, Judgment
from llmaas_plugins.knn_lm.mixing.mixture import Mixture

__all__ = ["MixCounts", "MixSettings", "MixSource", "Mixer", "Mixing"]


@dataclass(slots=True)
class MixCounts:
    """Counts of tokens by how they were handled.

    Attributes:
        mixed: Tokens sampled from a mixture.
        skipped: Tokens without a search, because the model was sure.
        distrusted: Tokens without a search, because the datastore does not know such text.
        unmatched: Tokens left unchanged, because their hidden states were not captured.
        at_other_levels: Tokens left unchanged, because a narrowed model computed them.
        search_s: Seconds that searches took.
    """

    mixed: int = 0
    skipped: int = 0
    distrusted: int = 0
    unmatched: int = 0
    at_other_levels: int = 0
    search_s: float = 0.0


@dataclass(frozen=True, slots=True)
class MixSettings:
    """How to mix in a datastore: fitted values, overridden by the configuration."""

    mixture: Mixture
    k: int
    skip_above: float

    @classmethod
    def of(cls, datastore: Datastore, config: KnnLMConfig) -> MixSettings:
        """Combine a datastore's fitted settings with the configuration.

        Raises:
            ValueError: The datastore has no valid settings.
        """
        found = datastore.settings
        mixture = Mixture.from_json(found.get("mixture"))
        chosen = {name: getattr(config, name) for name in ("alpha", "beta")}
        mixture = dataclasses.replace(
            mixture, **{name: value for name, value in chosen.items() if value is not None}
        )
        skip_above: Any = config.skip_above
        if skip_above is None:
            skip_above = found.get("skip_above")
        try:
            settings = cls(mixture, config.k, float(skip_above))
        except TypeError as error:
            raise ValueError(f"found skip_above {skip_above!r}, expected a number") from error
        if not 0 <= settings.skip_above <= 1:
            raise ValueError(f"found skip_above {skip_above!r}, expected 0 to 1")
        return settings


@dataclass(frozen=True, slots=True)
class MixSource:
    """A datastore, and how to mix it in.

    Attributes:
        datastore: Datastore to search.
        settings: How its pairs are mixed in.
        ranges: Rows that the app may use; None means all.
    """

    datastore: Datastore
    settings: MixSettings
    ranges: tuple[range, ...] | None = None

    @property
    def mixture(self) -> Mixture:
        """Parameters of the mixture."""
        return self.settings.mixture

    def search(self, query: npt.NDArray[np.float32]) -> Neighbors:
        """Return the nearest pairs."""
        return self.datastore.search(query, self.settings.k, self.ranges)


class Mixing(NamedTuple):
    """Datastore and judgment of one request.

    Attributes:
        source: Datastore, or None to mix nothing.
        judgment: Judgment of the datastore in the request, or None to trust it always.
    """

    source: MixSource | None
    judgment: Judgment | None

    def end(self) -> None:
        """Remember the judgment of the answer for prompts that follow it."""
        if self.judgment is not None:
            self.judgment.end()

    def forget(self, context_id: str) -> None:
        """Remember nothing more if the request is in this persistent context, which is erased."""
        if self.judgment is not None:
            self.judgment.forget(context_id)


class Mixer:
    """Mixer of one context, which relates each row of logits to the hidden state behind it."""

    def __init__(self, native: NativeContext, key: States, counts: MixCounts) -> None:
        """Capture the context's hidden states."""
        n_batch = int(llama_cpp.llama_n_batch(native.ctx))
        self._native = native
        self._states = native.hidden_states(key, capacity=n_batch)
        self._counts = counts
        self._rows = np.empty((0, 0), np.float32)
        self._has_keys_level = True
        self._edits: dict[int, _Edit | None] = {}
        self._former: dict[int, _Edit | None] = {}
        self._source: MixSource | None = None
        self._judgment: Judgment | None = None

    def close(self) -> None:
        """Stop capturing hidden states."""
        self._states.close()

    def decoded(self) -> None:
        """Take the hidden states of a batch that was evaluated; its rows can be sampled now."""
        self._rows = self._states.take()
        self._has_keys_level = self._native.level <= 0  # keys are made by the whole model
        self._edits.clear()
        self._former.clear()

    def resume(self, mixing: Mixing) -> None:
        """Begin a request, or go on with it after other requests used the context.

        It may sample from rows that were mixed for the request before.

        Args:
            mixing: Datastore to mix in until the next request, even if it is replaced meanwhile,
                and its judgment.
        """
        self._former |= self._edits
        self._edits.clear()
        self._source, self._judgment = mixing

    def end(self) -> None:
        """End the request, so that tokens that the app samples itself come from the model alone."""
        self._source = None

    def recall(self) -> None:
        """Recall how well the datastore predicted tokens that are not evaluated again."""
        if self._judgment is not None:
            self._judgment.recall()

    def judge(self, ctx: int, n_past: int, n_tokens: int) -> None:
        """Judge the datastore on the end of a prompt that was just evaluated (see ``trust``).

        Args:
            ctx: Address of the context.
            n_past: Tokens evaluated before this batch.
            n_tokens: Tokens in this batch.
        """
        judgment = self._judgment
        if judgment is None or self._source is None:
            return
        judgment.recall()
        if not self._has_keys_level:
            judgment.give_up()
        with self._unless_forgotten(self._source) as source:
            for place, n_behind in judgment.take(n_past, n_tokens, len(self._rows)):
                logits = _logits(ctx, -1 - n_behind)
                info, bets = logits_peek(logits), None
                if info.max_prob < source.settings.skip_above:
                    found = source.search(self._rows[-1 - n_behind])
                    bets = Bets.by(found, logits[found.values], info)
                judgment.judge(place, bets)

    def restore(self, view: LogitsView) -> None:
        """Restore the model's own logits in a row that was mixed for an earlier request."""
        if self._former and (edit := self._former.pop(_n_behind(view), None)) is not None:
            edit.undo(view.logits)

    def mix(self, view: LogitsView, tokens: Tokens) -> None:
        """Mix neighbors into a row of logits, in place and only once.

        Rows are counted from the last, because states of a failed batch may precede the first.

        Args:
            view: The row.
            tokens: Tokens up to the one whose row it is.
        """
        source, n_behind = self._source, _n_behind(view)
        if source is None or n_behind in self._edits:
            return
        row = len(self._rows) - 1 - n_behind
        if row < 0:
            self._counts.unmatched += 1
            return
        self._edits[n_behind] = None
        if not self._has_keys_level:
            self._counts.at_other_levels += 1
            return
        skip_above, judgment = source.settings.skip_above, self._judgment
        info = logits_peek(view.logits)
        is_sure = info.max_prob >= skip_above
        if is_sure and skip_above < 1:
            self._counts.skipped += 1
            if judgment is not None:
                judgment.sampled(tokens, None)
            return
        trust = 1.0 if judgment is None else judgment.trust.weight
        if trust == 0:
            self._counts.distrusted += 1
            return
        started = time.perf_counter()
        with self._unless_forgotten(source):
            found = source.search(self._rows[row])
            edit = self._edits[n_behind] = _mix(view.logits, found, source.mixture, trust)
            self._counts.mixed += 1
            if judgment is not None:
                bets = None if is_sure else Bets.by(found, edit.before, info)
                judgment.sampled(tokens, bets)
        self._counts.search_s += time.perf_counter() - started

    @contextlib.contextmanager
    def _unless_forgotten(self, source: MixSource) -> Iterator[MixSource]:
        """Guard a search: if the datastore was erased meanwhile, end mixing for this request."""
        try:
            yield source
        except StoreError:
            if source.datastore.is_current():
                raise
            self._source = None  # the next request opens the new datastore


@dataclass(frozen=True, slots=True, eq=False)
class _Edit:
    """Change that mixing made to a row of logits."""

    tokens: npt.NDArray[np.int32]
    before: npt.NDArray[np.float32]
    after: npt.NDArray[np.float32]

    def undo(self, logits: npt.NDArray[np.float32]) -> None:
        """Undo the change, unless the logits differ now: the app may have loaded a state."""
        if np.array_equal(logits[self.tokens], self.after):
            logits[self.tokens] = self.before


def _mix(
    logits: npt.NDArray[np.float32], found: Neighbors, mixture: Mixture, trust: float
) -> _Edit:
    before = logits[found.values]
    theta = mixture.theta
    # a weight is equivalent to a smaller distance: w exp(-d/theta) = exp(-(d - theta log w)/theta)
    distances = (found.distances - theta * np.log(found.weights)).astype(np.float32)
    alpha = trust * mixture.alpha
    logits_mix(logits, found.values, distances, alpha, mixture.beta, theta, mixture.far)
    return _Edit(found.values, before, logits[found.values])


def _logits(ctx: int, i: int) -> npt.NDArray[np.float32]:
    vocab = llama_cpp.llama_model_get_vocab(llama_cpp.llama_get_model(ctx))
    row = llama_cpp.llama_get_logits_ith(ctx, i)
    return as_array(row, shape=(llama_cpp.llama_vocab_n_tokens(vocab),))


def _n_behind(view: LogitsView) -> int:
    """Return how many of the batch's outputs follow these logits."""
    last = llama_cpp.llama_get_logits_ith(view.ctx, -1)
    start = as_array(last, shape=(1,)).ctypes.data
    return int((start - view.logits.ctypes.data) // view.logits.nbytes)

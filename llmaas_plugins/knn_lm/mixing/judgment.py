"""Judgment of the datastore in one request, on its prompt; and what later prompts can reuse."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from llmaas_hooks import Request, Tokens, forks
from llmaas_plugins._native import LogitsInfo
from llmaas_plugins.knn_lm.datastore.datastore import Neighbors
from llmaas_plugins.knn_lm.mixing.evidence import ANY_OTHER, Evidence, Prefix
from llmaas_plugins.knn_lm.mixing.mixture import Mixture
from llmaas_plugins.knn_lm.mixing.trust import UNJUDGED, PromptTrust, Trust, log_gain

__all__ = ["Bets", "Judgment"]

_NO_TOKEN = -2
"""Token number that no token and not ``ANY_OTHER`` has."""


class Bets(NamedTuple):
    """Predictions of a token by the neighbors and by the model.

    Attributes:
        found: Neighbors of the hidden state, at least one.
        logits: The model's logits of the neighbors' values.
        info: How certain the model was.
    """

    found: Neighbors
    logits: npt.NDArray[np.float32]
    info: LogitsInfo

    @classmethod
    def by(cls, found: Neighbors, logits: npt.NDArray[np.float32], info: LogitsInfo) -> Bets | None:
        """Return the predictions, or None if no neighbor was found, as with an approximate index.

        Args:
            found: Neighbors of the hidden state.
            logits: The model's logits of the neighbors' values.
            info: How certain the model was.
        """
        return cls(found, logits, info) if len(found.values) else None


class _Sampled(NamedTuple):
    """State from which a token of the answer was sampled.

    Attributes:
        prefix: Name of the text up to the state's token.
        n_tokens: Tokens of that text.
        bets: Predictions; None if nothing was searched or found.
        next_token: Token that followed; None if it is not in the cells.
    """

    prefix: bytes
    n_tokens: int
    bets: Bets | None
    next_token: int | None = None


class Judgment:
    """Trust in the datastore for one request, with the gains that are remembered for later ones."""

    def __init__(  # noqa: PLR0913, PLR0917  what is judged, by what, and where it is remembered
        self,
        request: Request,
        look_back: int,
        mixture: Mixture,
        datastore: bytes,
        evidence: Evidence | None,
        root: bytes,
    ) -> None:
        """Start without gains.

        Args:
            request: The request.
            look_back: Number of the prompt's last tokens on which the datastore is judged.
            mixture: Parameters of the mixture.
            datastore: Digest of the datastore.
            evidence: Gains of earlier requests; None if they cannot be used.
            root: Hash of what the gains depend on beside the tokens.
        """
        prompt = self._prompt = request.tokens
        self._mixture = mixture
        self._on_prompt = PromptTrust(prompt, look_back)
        self._datastore, self._evidence = datastore, evidence
        self._keeping = forks.lock()
        self._root, self._context_id = root, request.context_id
        self._text: Prefix | None = None
        self._prefixes: dict[int, bytes] = {}
        self._answer: deque[_Sampled] = deque(maxlen=look_back)

    @property
    def trust(self) -> Trust:
        """The trust that the known gains of the prompt's last tokens have earned."""
        return self._on_prompt.trust

    def give_up(self) -> None:
        """Return to the prior and remember nothing, because the states are not comparable."""
        self._on_prompt.give_up()
        self._evidence = None

    def recall(self) -> None:
        """Set the gains that are remembered, once it is known that the cells hold the prompt."""
        if self._text is not None:
            return
        self._text, evidence = Prefix(self._root), self._evidence
        for place in self._on_prompt.missing:
            prefix = self._prefixes[place] = self._text.upto(self._prompt[: place + 1])
            token = int(self._prompt[place + 1])
            gain = None if evidence is None else evidence.gain(prefix, token)
            if gain is not None:
                self._learn(place, gain)

    def take(self, n_past: int, n_tokens: int, n_rows: int) -> list[tuple[int, int]]:
        """Return what to judge in a batch of the prompt.

        Args:
            n_past: Tokens evaluated before this batch.
            n_tokens: Tokens in the batch.
            n_rows: Rows of hidden states, for the batch's last tokens.

        Returns:
            For each state: its place in the prompt, and its row counted from the last.
        """
        places, last = self._on_prompt.take(n_past, n_tokens, n_rows), n_past + n_tokens - 1
        return [(place, last - place) for place in places]

    def judge(self, place: int, bets: Bets | None) -> None:
        """Judge the predictions of the token after a place in the prompt.

        Args:
            place: The place.
            bets: The predictions; None if nothing was searched or found.
        """
        token = int(self._prompt[place + 1])
        self._learn(place, UNJUDGED if bets is None else self._gains([bets], [token])[0])

    def sampled(self, tokens: Tokens, bets: Bets | None) -> None:
        """Note how the token after a text of prompt and answer is predicted.

        Args:
            tokens: The text.
            bets: The predictions; None if nothing was searched or found.
        """
        if self._text is None:
            return  # the prompt is not all that precedes the answer
        if self._answer:
            before = self._answer[-1]
            if len(tokens) <= before.n_tokens:
                return  # it was evaluated again
            if before.n_tokens == len(self._prompt):  # prompts may go on otherwise
                self._keep_all(self._answer.pop())
            else:
                self._answer[-1] = before._replace(next_token=int(tokens[before.n_tokens]))
        self._answer.append(_Sampled(self._text.upto(tokens), len(tokens), bets))

    def end(self) -> None:
        """Remember the gains of the answer's last tokens."""
        if self._answer and self._answer[-1].next_token is None:
            self._keep_all(self._answer.pop())
        known = [
            (one.prefix, one.bets, one.next_token)
            for one in self._answer
            if one.bets is not None and one.next_token is not None
        ]
        gains = self._gains([bets for _, bets, _ in known], [token for *_, token in known])
        for (prefix, _, token), gain in zip(known, gains, strict=True):
            self._keep(prefix, {token: gain})
        for one in self._answer:
            if one.bets is None:
                self._keep(one.prefix, {ANY_OTHER: UNJUDGED})
        self._answer.clear()

    def forget(self, context_id: str) -> None:
        """Remember nothing more if the request is in this persistent context, which is erased.

        Another thread may be about to remember gains; when this method returns, it has done so.
        """
        if context_id == self._context_id:
            with self._keeping:
                self._evidence = None

    # -- inside ---------------------------------------------------------------------------------

    def _learn(self, place: int, gain: float) -> None:
        """Set the gain of the token after a place in the prompt, or ``UNJUDGED``."""
        self._on_prompt.learn(place, gain)
        self._keep(self._prefixes[place], {int(self._prompt[place + 1]): gain})

    def _keep_all(self, one: _Sampled) -> None:
        """Remember the gains of all tokens that may come next."""
        if one.bets is None:
            self._keep(one.prefix, {ANY_OTHER: UNJUDGED})
            return
        tokens = [ANY_OTHER, *np.unique(one.bets.found.values).tolist()]
        gains = self._gains([one.bets] * len(tokens), tokens)
        self._keep(one.prefix, dict(zip(tokens, gains, strict=True)))

    def _gains(self, bets: Sequence[Bets], tokens: Sequence[int]) -> list[float]:
        """Return the gain of each token by its bets.

        The ratio of both probabilities is the same for all tokens without a neighbor.
        """
        if not bets:
            return []
        hits = _rows([one.found.values for one in bets], _NO_TOKEN) == np.array(tokens)[:, None]
        distances = _rows([one.found.distances for one in bets], np.inf)
        weights = _rows([one.found.weights for one in bets], 1)
        logits = _rows([one.logits for one in bets], 0)[np.arange(len(bets)), hits.argmax(axis=1)]
        sums = np.array([one.info.log_sum_exp for one in bets])
        p_lm = np.where(hits.any(axis=1), np.exp(logits - sums), 1.0).astype(np.float32)
        p_max = np.array([one.info.max_prob for one in bets], np.float32)
        p = self._mixture.probability(distances, hits, weights, p_lm, p_max)
        both = zip(p.tolist(), p_lm.tolist(), strict=True)
        return [log_gain(mixed, alone) if alone else UNJUDGED for mixed, alone in both]

    def _keep(self, prefix: bytes, gains: Mapping[int, float]) -> None:
        with self._keeping:
            if self._evidence is not None:
                self._evidence.keep(self._datastore, prefix, gains, self._context_id)


def _rows(parts: Sequence[npt.NDArray[Any]], filler: float) -> npt.NDArray[Any]:
    """Return arrays as rows of one array, each filled up to the longest."""
    rows = np.full((len(parts), max(map(len, parts))), filler, parts[0].dtype)
    for row, part in zip(rows, parts, strict=True):
        row[: len(part)] = part
    return rows

"""Judgment of the datastore in one request, on its prompt; and what later prompts can reuse."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from llmaas_hooks import Tokens
from llmaas_plugins._native import LogitsInfo
from llmaas_plugins.knn_lm.datastore.datastore import Neighbors
from llmaas_plugins.knn_lm.mixing.evidence import ANY_OTHER, Evidence, Prefix
from llmaas_plugins.knn_lm.mixing.mixture import Mixture
from llmaas_plugins.knn_lm.mixing.trust import UNJUDGED, PromptTrust, Trust, log_gain

__all__ = ["Bets", "Judgment", "p_mix"]


@dataclass(frozen=True, slots=True, eq=False)
class Bets:
    """Prediction of a token that was not known yet.

    Attributes:
        found: Neighbors of the hidden state.
        logits: The model's logits of the neighbors' values.
        info: How certain the model was.
        mixture: Parameters of the mixture.
    """

    found: Neighbors
    logits: npt.NDArray[np.float32]
    info: LogitsInfo
    mixture: Mixture

    def gains(self) -> dict[int, float]:
        """Return the gain of each token that a neighbor names, after that of ``ANY_OTHER``.

        The ratio of both probabilities is the same for all tokens without a neighbor.
        """
        tokens, places = np.unique(self.found.values, return_index=True)
        logits = self.logits[places].astype(np.float64)
        p_lm = np.exp(logits - self.info.log_sum_exp).tolist()
        each = [(ANY_OTHER, 1.0), *zip(tokens.tolist(), p_lm, strict=True)]
        return {token: self._gain(token, p) for token, p in each}

    def _gain(self, token: int, p_lm: float) -> float:
        if p_lm == 0:
            return UNJUDGED
        return log_gain(p_mix(token, p_lm, self.info.max_prob, self.found, self.mixture), p_lm)


@dataclass(frozen=True, slots=True, eq=False)
class _Sampled:
    """State from which a token of the answer was sampled.

    Attributes:
        prefix: Name of the text up to the state's token.
        n_tokens: Tokens of that text.
        bets: Predictions; None if the model was sure.
        next_token: Token that followed; None if it is not in the cells.
    """

    prefix: bytes
    n_tokens: int
    bets: Bets | None
    next_token: int | None = None

    def gains(self) -> dict[int, float]:
        """Return the gains of the next token, or of all tokens that may come next."""
        gains = {ANY_OTHER: UNJUDGED} if self.bets is None else self.bets.gains()
        if self.next_token is None:
            return gains
        return {self.next_token: gains.get(self.next_token, gains[ANY_OTHER])}


class Judgment:
    """Trust in the datastore for one request, with the gains that are remembered for later ones."""

    def __init__(
        self,
        prompt: Tokens,
        look_back: int,
        evidence: Evidence,
        root: bytes,
        context_id: str | None,
    ) -> None:
        """Start without gains.

        Args:
            prompt: Tokens of the prompt.
            look_back: Number of the prompt's last tokens on which the datastore is judged.
            evidence: Gains of earlier requests.
            root: Hash of what the gains depend on beside the tokens.
            context_id: Persistent context of the request, or None.
        """
        self._prompt, self._look_back = prompt, look_back
        self._on_prompt = PromptTrust(prompt, look_back)
        self._evidence: Evidence | None = evidence
        self._root, self._context_id = root, context_id
        self._text: Prefix | None = None
        self._prefixes: dict[int, bytes] = {}
        self._answer: deque[_Sampled] = deque(maxlen=look_back)

    @property
    def trust(self) -> Trust:
        """The trust that the known gains of the prompt's last tokens have earned."""
        return self._on_prompt.trust

    def give_up(self) -> None:
        """Return to the prior, because the states are not comparable."""
        self._on_prompt.give_up()

    def recall(self) -> None:
        """Set the gains that are remembered, once it is known that the cells hold the prompt."""
        if self._text is not None:
            return
        self._text = Prefix(self._root)
        for place in self._on_prompt.missing:
            prefix = self._prefixes[place] = self._text.upto(self._prompt[: place + 1])
            token = int(self._prompt[place + 1])
            gain = None if self._evidence is None else self._evidence.gain(prefix, token)
            if gain is not None:
                self.learn(place, gain)

    def take(self, n_past: int, n_tokens: int, n_rows: int) -> list[tuple[int, int, int]]:
        """Return what to judge in a batch of the prompt.

        Args:
            n_past: Tokens evaluated before this batch.
            n_tokens: Tokens in the batch.
            n_rows: Rows of hidden states, for the batch's last tokens.

        Returns:
            For each state: its place in the prompt, its row counted from the last, and the token
            that followed.
        """
        places, last = self._on_prompt.take(n_past, n_tokens, n_rows), n_past + n_tokens - 1
        return [(place, last - place, int(self._prompt[place + 1])) for place in places]

    def learn(self, place: int, gain: float) -> None:
        """Set the gain of the token after a place in the prompt, or ``UNJUDGED``."""
        self._on_prompt.learn(place, gain)
        self._keep(self._prefixes[place], {int(self._prompt[place + 1]): gain})

    def sampled(self, tokens: Tokens, bets: Bets | None) -> None:
        """Note how the token after a text of prompt and answer is predicted.

        Args:
            tokens: The text.
            bets: The predictions; None if the model is sure.
        """
        if self._text is None:
            return  # the prompt is not all that precedes the answer
        answer = self._answer
        if answer and answer[-1].n_tokens < len(tokens):
            answer[-1] = replace(answer[-1], next_token=int(tokens[answer[-1].n_tokens]))
        answer.append(_Sampled(self._text.upto(tokens), len(tokens), bets))

    def end(self) -> None:
        """Remember the gains of the answer's last tokens."""
        while self._answer:
            one = self._answer.popleft()
            self._keep(one.prefix, one.gains())

    def forget(self, context_id: str) -> None:
        """Remember nothing more if the request is in this persistent context, which is erased."""
        if context_id == self._context_id:
            self._evidence = None

    # -- inside ---------------------------------------------------------------------------------

    def _keep(self, prefix: bytes, gains: Mapping[int, float]) -> None:
        if self._evidence is not None:
            self._evidence.keep(prefix, gains, self._context_id)


def p_mix(token: int, p_lm: float, p_max: float, found: Neighbors, mixture: Mixture) -> float:
    """Return the mixture's probability of a token, with full trust.

    Args:
        token: The token.
        p_lm: The model's probability of the token.
        p_max: The model's largest probability.
        found: Neighbors of the hidden state.
        mixture: Parameters of the mixture.
    """
    hits = (found.values == token)[None]
    each = (np.array([p], np.float32) for p in (p_lm, p_max))
    p = mixture.probability(found.distances[None], hits, found.weights[None], *each)
    return float(p[0])

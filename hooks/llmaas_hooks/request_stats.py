"""Counts and times of requests."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["RequestStats"]


@dataclass(frozen=True, slots=True)
class RequestStats:
    """Counts and times of a finished request.

    Attributes:
        n_prompt: Number of prompt tokens.
        n_reused: Number of prompt tokens whose cells were there before evaluation started.
        n_generated: Number of generated tokens.
        prepare_s: Seconds from the call until evaluation could start (the switch latency).
        first_token_s: Seconds from the call to the first token; None if there was no token.
        total_s: Seconds from the call until its generator ended.
        decode_s: Seconds that the tokens after the first took, without the app's time between them.
        first_away_s: Seconds of ``first_token_s`` in which other requests used the engine.
        decode_away_s: Seconds of ``decode_s`` in which other requests used the engine.
        pending_s: Seconds for which the app had waited for a further token that did not come any
            more; 0 if it waited for none.
    """

    n_prompt: int
    n_reused: int
    n_generated: int
    prepare_s: float
    first_token_s: float | None
    total_s: float
    decode_s: float = 0.0
    first_away_s: float = 0.0
    decode_away_s: float = 0.0
    pending_s: float = 0.0

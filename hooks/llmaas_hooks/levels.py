"""Shares of a model, and of a prompt, that requests use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmaas_hooks.errors import ConfigError

__all__ = ["LEAST_LEVEL", "NO_LEVELS", "Levels"]

LEAST_LEVEL = 0.2
"""Smallest level of an elastic model (ElastiLM §3.2)."""
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Levels:
    """Shares of an elastic model's block weights that a request computes with, and of its prompt.

    A share of the weights, a level, is 0.2 to 1.0. None leaves the choice to the next source: the
    app is asked first, then ``llmaas_level``, then the configuration.

    Attributes:
        prefill: Share for the prompt, or None.
        decode: Share from the first sampled token on, or None.
        prompt_share: Share of the prompt's tokens that the request reads, above 0 and at most 1, or
            None. A prompt with 1 stays whole.
        at_first_token: Function from the logits of the first token, shape ``(n_vocab,)``, to the
            share that replaces ``decode``. It must not change or keep the logits.
        at_resume: Function from the number of tokens that were sampled to the share that replaces
            ``decode`` when the answer goes on after other requests used its engine.
    """

    prefill: float | None = None
    decode: float | None = None
    prompt_share: float | None = field(default=None, kw_only=True)
    at_first_token: Callable[[NDArray[np.float32]], float] | None = field(
        default=None, kw_only=True
    )
    at_resume: Callable[[int], float] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        """Check the shares.

        Raises:
            ConfigError: A level is not a number from 0.2 to 1.0, or the level to replace is None,
                or the share of the prompt is not above 0 and at most 1.
        """
        if self.prompt_share is not None and not _is_share(self.prompt_share):
            raise ConfigError(
                "the share of a prompt must be a number above 0 and at most 1, found "
                f"{self.prompt_share!r}"
            )
        for name in ("at_first_token", "at_resume"):
            if getattr(self, name) is not None and self.decode is None:
                raise ConfigError(f"{name} replaces the level of decode, which is None")
        for name, level in (("prefill", self.prefill), ("decode", self.decode)):
            if level is not None and not _is_level(level):
                is_one = repr(self.prefill) == repr(self.decode)  # true for two NaNs, too
                which = "the level" if is_one else f"the level of {name}"
                raise ConfigError(
                    f"{which} must be a number from {LEAST_LEVEL} to 1.0, found {level!r}"
                )

    @property
    def are_named(self) -> bool:
        """Whether there is a level for the prompt or for the answer."""
        return self.prefill is not None or self.decode is not None

    def over(self, other: Levels | None) -> Levels:
        """Return these levels, with each None replaced by the level of ``other``."""
        if other is None:
            return self
        answer = other if self.decode is None else self
        return Levels(
            other.prefill if self.prefill is None else self.prefill,
            answer.decode,
            prompt_share=other.prompt_share if self.prompt_share is None else self.prompt_share,
            at_first_token=answer.at_first_token,
            at_resume=answer.at_resume,
        )


def _is_level(value: Any) -> bool:
    return _is_share(value) and bool(value >= LEAST_LEVEL - _ROUNDING)


def _is_share(value: Any) -> bool:
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    number: Any = value  # not a float: an integer may be too large for one
    return bool(0 < number <= 1)


NO_LEVELS = Levels()

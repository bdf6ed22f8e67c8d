"""Settings of the deadlines plugin."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from llmaas_hooks import ConfigError, Limit, Promise
from llmaas_plugins.deadlines.answers import MOST_ANSWER

__all__ = ["AppPromise", "DeadlinesConfig", "Risk"]

_N_ANSWER, _CONFIDENCE = 8, 0.95


def _limit(value: Any) -> Limit | None:
    try:
        return None if value is None else Limit.of(value)
    except ConfigError as error:
        raise ValueError(str(error)) from None


_Limit = Annotated[Limit | None, BeforeValidator(_limit)]


class Risk(NamedTuple):
    """Risk that an app accepts.

    Attributes:
        most: Largest probability of another answer than the whole model's.
        confidence: Probability that a certificate holds.
    """

    most: float
    confidence: float


class AppPromise(BaseModel):
    """Table ``[plugins.deadlines.apps.NAME]``: latency of one app's requests."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    ttft: _Limit = Field(
        default=None,
        description="Longest time to the first token: `300 ms`, or a share of the whole model's "
        "time such as `60 %`.",
    )
    tpot: _Limit = Field(
        default=None, description="Longest mean time of each further token, in the same forms."
    )
    max_risk: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="Largest probability that an answer differs from the whole model's. The "
        "fastest setting with a certificate of it is used. Unset: the best answer that the limits "
        "allow.",
    )
    confidence: float | None = Field(
        default=None,
        ge=0.5,
        lt=1,
        description=f"Probability that a certificate of `max_risk` holds; {_CONFIDENCE} if unset.",
    )
    answer_tokens: int | None = Field(
        default=None,
        ge=1,
        le=MOST_ANSWER,
        description="First tokens of an answer that must not differ from the whole model's; "
        f"{_N_ANSWER} if unset.",
    )

    def promise(self) -> Promise:
        """Return the two limits as a promise."""
        return Promise(self.ttft, self.tpot)


class DeadlinesConfig(AppPromise):
    """Table ``[plugins.deadlines]``: its limits hold for requests that name none."""

    apps: Mapping[str, AppPromise] = Field(
        default_factory=dict, description="Limits of the requests of an app, by the app's name."
    )

    def promise_of(self, app: str | None) -> Promise:
        """Return the configured limits of an app's requests."""
        return self._own(app).promise().over(self.promise())

    def risk_of(self, app: str | None) -> Risk | None:
        """Return the risk that an app accepts; None if nothing limits it."""
        most = self._own(app).max_risk or self.max_risk
        confidence = self._own(app).confidence or self.confidence or _CONFIDENCE
        return None if most is None else Risk(most, confidence)

    def n_answer_of(self, app: str | None) -> int:
        """Return how many first tokens of an app's answers count."""
        return self._own(app).answer_tokens or self.answer_tokens or _N_ANSWER

    def _own(self, app: str | None) -> AppPromise:
        return self if app is None else self.apps.get(app, self)

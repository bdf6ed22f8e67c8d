"""Settings of the deadlines plugin."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from llmaas_hooks import ConfigError, Limit, Promise

__all__ = ["AppPromise", "DeadlinesConfig"]


def _limit(value: Any) -> Limit | None:
    try:
        return None if value is None else Limit.of(value)
    except ConfigError as error:
        raise ValueError(str(error)) from None


_Limit = Annotated[Limit | None, BeforeValidator(_limit)]


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
        own = self.apps.get(app) if app is not None else None
        return self.promise() if own is None else own.promise().over(self.promise())

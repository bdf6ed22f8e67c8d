"""Settings of the cloud that `llmaas serve` may ask."""

from __future__ import annotations

import re
from typing import Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from llmaas_plugins.sizes import Seconds

__all__ = ["UNQUOTED", "CloudApp", "CloudConfig"]

UNQUOTED = "unquoted"
"""Type of errors about values that may be secrets, so that no message may quote them."""
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_URL = "expected a URL such as https://api.example.org/v1, without user, query or fragment"


class CloudApp(BaseModel):
    """Table ``[cloud.apps.NAME]`` of ``llmaas.toml``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    private: bool = Field(default=False, description="Never send this app's requests to the cloud.")
    keep: bool = Field(
        default=False,
        description="Put what the cloud says to this app into the inbox of knn_lm's datastore.",
    )

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        """Refuse consent to keep answers that the cloud can never give."""
        if self.private and self.keep:
            raise ValueError("expected private or keep: the cloud says nothing to a private app")
        return self


class CloudConfig(BaseModel):
    """Table ``[cloud]`` of ``llmaas.toml``; without it, nothing is sent anywhere."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    base_url: str = Field(
        description="Address of a service with OpenAI's API, up to and with its version: "
        "https://api.example.org/v1."
    )
    model: str = Field(min_length=1, description="Name of the model to ask for there.")
    key_env: str | None = Field(
        default=None,
        description="Name of the environment variable that contains the service's API key.",
    )
    timeout_s: Seconds = Field(
        default=30,
        gt=0,
        description="Longest wait for a whole answer, or for the next event of a streamed one.",
    )
    apps: dict[str, CloudApp] = Field(
        default={}, description="Tables of apps, by the names in service.key_file."
    )

    @field_validator("base_url")
    @classmethod
    def _is_address(cls, url: str) -> str:
        """Refuse addresses that are malformed, or that contain a user's password."""
        is_plain = url.isascii() and url.isprintable() and not set(" ?#@") & set(url)
        try:
            parts = urlsplit(url)
            is_whole = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:  # brackets without an address, or an impossible port
            is_whole = False
        if not (is_plain and is_whole):
            raise PydanticCustomError(UNQUOTED, _URL)
        return url.rstrip("/")

    @field_validator("key_env")
    @classmethod
    def _is_variable(cls, name: str | None) -> str | None:
        """Refuse a key in place of the variable's name."""
        if name is not None and not _VARIABLE.fullmatch(name):
            message = "expected the name of an environment variable, never the key itself"
            raise PydanticCustomError(UNQUOTED, message)
        return name

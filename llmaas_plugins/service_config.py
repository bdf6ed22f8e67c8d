"""Settings of the service."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ByteSize, ConfigDict, Field, ValidationInfo, field_validator

from llmaas_plugins.sizes import Count, Seconds, Size

__all__ = ["APP_NAMES", "ServiceConfig", "is_app_name"]

APP_NAMES = "1 to 128 printable characters without '/'"
"""Names that apps may have, in words."""
_LONGEST_NAME = 128

_NAMES = {
    "allowed_hosts": (re.compile(r"[^\s/:*\[\]]+|[0-9a-f:]+"), "box.example.org"),
    "allowed_origins": (re.compile(r"[a-z][a-z0-9+.-]*://[^\s/*]+"), "https://example.org"),
}


def is_app_name(name: str) -> bool:
    """Return whether an app may have a name; its contexts have it in their paths."""
    return 0 < len(name) <= _LONGEST_NAME and name.isprintable() and "/" not in name


class ServiceConfig(BaseModel):
    """Table ``[service]`` of ``llmaas.toml``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    state_dir: Path = Field(
        default=Path("~/.local/share/llmaas"),
        description="Where the contexts' token logs live (one SQLite file).",
    )
    max_contexts_per_app: Count = Field(
        default=16, ge=1, description="Contexts an app may hold at a time (LLMS §3.1, K)."
    )
    max_context_tokens: Count | None = Field(
        default=None, ge=16, description="Longest context; the engine's n_ctx when unset."
    )
    at_limit: Literal["slide", "error"] = Field(
        default="slide",
        description="Behavior of a context at its longest: drop the oldest turns, or refuse.",
    )
    max_new_tokens: Count = Field(
        default=256, ge=1, description="Tokens that a call generates by default."
    )
    max_queue: Count = Field(
        default=32, ge=1, description="Calls that may wait for the engine; one more is refused."
    )
    schedule: Literal["deadline", "fifo"] = Field(
        default="deadline",
        description="Order of calls: by the latency that they are promised, or of their arrival. "
        "Without promises, both are the order of arrival.",
    )
    preempt: bool = Field(
        default=True,
        description="Whether a call may be interrupted for one that would be late otherwise.",
    )
    most_together: Count = Field(
        default=1,
        ge=1,
        le=16,
        description="Most calls whose answers are decoded together, a token of each in one batch.",
    )
    longest_overtaken_s: Seconds = Field(
        default=10,
        ge=0,
        description="Time after its arrival from which a call is overtaken no more.",
    )
    max_body_bytes: Size = Field(
        default=ByteSize(1 << 20), ge=1024, description="Longest body of a request to the server."
    )
    max_connections: Count = Field(
        default=64,
        ge=1,
        description="Most connections to the server; a further one replaces an idle one.",
    )
    client_timeout_s: Seconds = Field(
        default=30,
        gt=0,
        description="Longest time for a client to send a request, or to accept part of an answer.",
    )
    shutdown_grace_s: Seconds = Field(
        default=10,
        ge=0,
        description="Time that the running call may take to finish once the server is stopped.",
    )
    allowed_hosts: tuple[str, ...] = Field(
        default=(),
        description="Host names that the server accepts, besides loopback's and the one of --host.",
    )
    allowed_origins: tuple[str, ...] = Field(
        default=(),
        description="Origins, such as https://example.org, whose web pages may use the server.",
    )
    key_file: Path | None = Field(
        default=None,
        description='TOML file, mode 0600, with lines `app = "key"`: the keys of the apps.',
    )

    @field_validator("allowed_hosts", "allowed_origins")
    @classmethod
    def _names(cls, found: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        """Refuse names that no browser sends, and which would therefore never match."""
        pattern, example = _NAMES[str(info.field_name)]
        names = tuple(name.lower() for name in found)
        if not all(map(pattern.fullmatch, names)):
            raise ValueError(f"expected names like {example!r}")  # pydantic adds the value found
        return names

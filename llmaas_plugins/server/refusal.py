"""Refusals: answers to clients whose requests are not served."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from typing import Any

__all__ = ["Refusal", "error_body", "mistakes", "stopping"]

_MOST_MISTAKES = 3
_RETRY_AFTER_S = {429: 1, 503: 5}


class Refusal(Exception):  # noqa: N818  not an error of the service
    """An answer that ends a request before it is served, or instead of serving it."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        """Refuse with an HTTP status, and optionally an error code as in OpenAI's API."""
        super().__init__(message)
        self.status = status
        self.code = code

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """Headers of the answer."""
        headers = [(b"content-type", b"application/json")]
        if (wait_s := _RETRY_AFTER_S.get(self.status)) is not None:
            headers.append((b"retry-after", b"%d" % wait_s))
        if self.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        return headers

    def body(self) -> bytes:
        """Return the answer as a JSON document."""
        return json.dumps(error_body(self.status, str(self), self.code)).encode()

    def event(self) -> bytes:
        """Return the answer as the last event of a stream that has begun."""
        return b"event: error\ndata: %s\n\n" % self.body()


def error_body(status: int, message: str, code: str | None = None) -> dict[str, Any]:
    """Return an error in the forms of OpenAI (``error``) and of FastAPI (``detail``)."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    error = {"message": message, "type": kind, "param": None, "code": code}
    return {"error": error, "detail": message, "status": status}


def stopping() -> Refusal:
    """Return the refusal for calls that the service will not finish."""
    return Refusal(503, "The service is stopping. Try again later.", "service_stopping")


def mistakes(errors: Iterable[Any]) -> str:
    """Describe pydantic's ``errors()`` about a body in one line."""
    first = itertools.islice(errors, _MOST_MISTAKES)
    return "; ".join(f"{'.'.join(map(str, error['loc']))}: {_reason(error)}" for error in first)


def _reason(error: Any) -> str:
    if error["type"] == "extra_forbidden":
        return "unknown key"
    return str(error["msg"]).removeprefix("Value error, ")

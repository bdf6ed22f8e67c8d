"""Hybrid of cloud and device (Fig. 1 of the KDD'24 paper): which requests go to the cloud.

The cloud answers OpenAI's completions while it can be reached. The local model answers all others:
those that are private, those that only the local model can serve, and those that the cloud fails.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import anyio
from starlette.concurrency import run_in_threadpool

from llmaas_plugins.chats.exports import Message as Said
from llmaas_plugins.cloud_config import CloudApp, CloudConfig
from llmaas_plugins.failure_log import FailureLog
from llmaas_plugins.server.body_values import parsed
from llmaas_plugins.server.circuit_breaker import Attempt, CircuitBreaker
from llmaas_plugins.server.cloud_answers import StreamedAnswer, WholeAnswer
from llmaas_plugins.server.cloud_client import CloudClient, CloudError
from llmaas_plugins.server.exchange import Answer, Message, header
from llmaas_plugins.server.refusal import Refusal

__all__ = ["Gateway", "Keep"]

Keep = Callable[[str, Sequence[Said]], object]
"""Function that puts a conversation of an app into the datastore's inbox."""

_PATHS = {"chat": "/chat/completions", "completion": "/completions"}
_CHOICE = b"x-llmaas-cloud"
_LOCAL_HEADERS = (b"x-llmaas-level", b"x-llmaas-prompt-share", b"x-llmaas-slo")
_LOCAL_FIELDS = ("grammar", "level", "logit_bias", "prompt_share", "slo")
_OUTCOMES = (
    "asked",
    "answered",
    "broken_off",
    "failed",
    "refused",
    "left_alone",
    "local_only",
    "private",
    "kept",
    "not_kept",
)

_log = logging.getLogger("llmaas.server")


@dataclass(frozen=True, slots=True)
class _Asked:
    """Request for the cloud.

    Attributes:
        body: Body to send.
        model: Name of the model that the client asked for.
        is_stream: Whether the answer is a stream.
        question: Texts since the last answer, if the answer may be kept.
    """

    body: bytes
    model: str
    is_stream: bool
    question: tuple[Said, ...]


class Gateway:
    """Sends requests to the cloud, as long as that answers.

    Attributes:
        counts: Number of requests by outcome, and of answers that were kept.
    """

    def __init__(
        self,
        config: CloudConfig,
        client: CloudClient,
        keep: Keep,
        breaker: CircuitBreaker | None = None,
    ) -> None:
        """Ask the cloud with ``client``, and keep answers with ``keep``."""
        self._config = config
        self._client = client
        self._keep = keep
        self._breaker = breaker or CircuitBreaker()
        self._failures = FailureLog(_log)
        self._refusals: set[str] = set()
        self._keeping = FailureLog(_log)
        self.counts = dict.fromkeys(_OUTCOMES, 0)

    def status(self) -> dict[str, float]:
        """Return the counts, and the seconds for which the cloud is left alone."""
        return {**self.counts, "left_alone_s": round(self._breaker.left_s, 1)}

    def may_answer(self, route: str, app: str, scope: Message, answer: Answer) -> bool:
        """Return whether the cloud may be asked, as far as can be told without the body.

        Raises:
            Refusal: Header X-LLMaaS-Cloud has a value that does not exist.
        """
        if route not in _PATHS or scope["method"] != "POST":
            return False
        if self._of(app).private or _is_private(scope):
            return self._stays(answer, "private")
        if any(header(scope, name) for name in _LOCAL_HEADERS):
            return self._stays(answer, "local_only")
        return not self._breaker.is_open or self._stays(answer, "left_alone")

    async def answer(self, route: str, app: str, body: bytes, answer: Answer) -> bool:
        """Let the cloud answer a request that it may answer; return whether it did.

        Raises:
            Refusal: The cloud failed in the middle of a stream.
        """
        asked = await run_in_threadpool(self._asked, route, app, body)
        if asked is None:
            return self._stays(answer, "local_only")
        attempt = self._breaker.begin()
        if attempt is None:
            return self._stays(answer, "left_alone")
        self.counts["asked"] += 1
        keeps = bool(asked.question)
        relay = (StreamedAnswer if asked.is_stream else WholeAnswer)(asked.model, keeps=keeps)
        try:
            await self._relay(_PATHS[route], asked, relay, answer)
        except CloudError as error:
            return self._failed(error, attempt, answer)
        except BaseException:
            self._breaker.gave_up(attempt)
            raise
        finally:
            if relay.text.strip():
                with anyio.CancelScope(shield=True):  # clients leave once they have the answer
                    await self._remember(app, [*asked.question, Said("assistant", relay.text)])
        self.counts["answered"] += 1
        return True

    def _of(self, app: str) -> CloudApp:
        return self._config.apps.get(app) or CloudApp()

    def _stays(self, answer: Answer, reason: str) -> bool:
        """Note that a request is answered locally, and why; return False."""
        self.counts[reason] += 1
        answer.cloud = {"answered_by": "local", "reason": reason}
        return False

    def _asked(self, route: str, app: str, body: bytes) -> _Asked | None:
        """Return the request for the cloud; None if only the local model can serve it."""
        values = parsed(body)
        form = values.get("response_format")
        has_own_schema = isinstance(form, dict) and "schema" in form
        if has_own_schema or any(values.get(name) is not None for name in _LOCAL_FIELDS):
            return None
        model, stream = values.get("model"), values.get("stream")
        if not isinstance(stream, bool | None):
            return None  # the local service takes 1 and "yes", too; the cloud might not
        keeps = route == "chat" and self._of(app).keep
        return _Asked(
            json.dumps(values | {"model": self._config.model}).encode(),
            model if isinstance(model, str) else self._config.model,
            bool(stream),
            _question(values.get("messages")) if keeps else (),
        )

    async def _relay(
        self, path: str, asked: _Asked, relay: WholeAnswer | StreamedAnswer, answer: Answer
    ) -> None:
        """Send the request, and pass the answer on.

        Raises:
            CloudError: The cloud fails; if nothing has been passed on, another can still answer.
        """
        timeout_s = self._config.timeout_s
        async with contextlib.AsyncExitStack() as stack:
            try:
                with anyio.fail_after(timeout_s):
                    post = self._client.post(path, asked.body)
                    await relay.begin(await stack.enter_async_context(post))
            except TimeoutError as error:
                raise CloudError(f"no answer within {timeout_s:g} s") from error
            self._breaker.worked()
            self._failures.worked()
            answer.cloud = {"answered_by": "cloud"}
            async for message in relay.messages(timeout_s):
                await answer.send(message)
        await answer.flush()

    def _failed(self, error: CloudError, attempt: Attempt, answer: Answer) -> bool:
        """Note that the cloud failed; return False.

        Raises:
            Refusal: The answer has begun.
        """
        if error.is_about_request:
            self._breaker.worked()
            self._say_refused(str(error))
            return self._stays(answer, "refused")
        self._breaker.failed(attempt)
        self._failures.failed("the cloud fails, so requests are answered locally: %s", error)
        if not answer.has_begun:
            return self._stays(answer, "failed")
        self.counts["broken_off"] += 1
        message = f"The cloud failed in the middle of its answer: {error}. Ask again."
        raise Refusal(502, message, "cloud_failed") from error

    def _say_refused(self, reason: str) -> None:
        """Log a reason for which the cloud refuses requests, once."""
        if reason not in self._refusals:
            self._refusals.add(reason)
            _log.warning(
                "the cloud refuses a request, so it is answered locally: %s; further ones are only "
                "counted",
                reason,
            )

    async def _remember(self, app: str, said: Sequence[Said]) -> None:
        """Keep a question and its answer; a failure is logged, and costs the client nothing."""
        try:
            await run_in_threadpool(self._keep, app, said)
        except Exception as error:
            self.counts["not_kept"] += 1
            self._keeping.failed("what the cloud said cannot be kept: %s", error)
            return
        self.counts["kept"] += 1
        self._keeping.worked()


def _is_private(scope: Message) -> bool:
    """Return whether header X-LLMaaS-Cloud keeps a request from the cloud.

    Raises:
        Refusal: It has another value than ``never``; ignoring that could reveal something private.
    """
    said = {value.strip().lower() for name, value in scope["headers"] if name == _CHOICE}
    if not said <= {b"never"}:
        found = b", ".join(sorted(said)).decode("latin-1")
        raise Refusal(400, f"X-LLMaaS-Cloud: expected never, found {found[:40]!r}")
    return bool(said)


def _question(messages: Any) -> tuple[Said, ...]:
    """Return the user's messages since the last answer; none if one of them is not plain text.

    Earlier answers are kept already, or the local model gave them.
    """
    found: list[Said] = []
    for message in reversed(messages):
        if message.get("role") != "user":
            break
        text = message.get("content")
        if not (isinstance(text, str) and text.strip()):
            return ()
        found.append(Said("user", text))
    return tuple(reversed(found))

"""Middleware that checks a request before the server parses it.

It checks key, size and form of a request, and its turn on the engine. One pure ASGI middleware
serves all routes, llama_cpp.server's and ours, so no route bypasses a limit. A waiting call costs
only its body and a few small objects.
"""

from __future__ import annotations

import asyncio
import functools
import re
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, TypeVar

import anyio
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect

from llmaas_hooks import NO_PROMISE, ConfigError, Levels, Promise, UnknownPluginError
from llmaas_hooks.request_scope import (
    at_levels,
    checked_by,
    noting,
    promising,
    serving_context,
)
from llmaas_plugins.activation import without
from llmaas_plugins.server.admission import Admission, check_wanted
from llmaas_plugins.server.api_keys import ApiKeys
from llmaas_plugins.server.body_checks import check_body
from llmaas_plugins.server.calls import Call
from llmaas_plugins.server.exchange import CALLER, Answer, Message, Question, Receive, Send, header
from llmaas_plugins.server.gateway import Gateway
from llmaas_plugins.server.grammars import Grammars, Wanted
from llmaas_plugins.server.metrics import Metrics
from llmaas_plugins.server.origins import OriginCheck
from llmaas_plugins.server.refusal import Refusal, stopping
from llmaas_plugins.server.upstream import is_open, stream_failure
from llmaas_plugins.service.level_arguments import check_levels, levels_in_header
from llmaas_plugins.service.promise_arguments import (
    check_promise,
    configured_promise,
    promise_in_header,
)
from llmaas_plugins.service.share_arguments import check_share, share_in_header

__all__ = ["RequestMiddleware", "Route", "route_of"]

_Asked = TypeVar("_Asked", Levels, Promise)

App = Callable[[Message, Receive, Send], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Route:
    """A class of routes.

    Attributes:
        name: Name of the class in metrics.
        path: Pattern of the paths, with a group ``app`` if they belong to an app.
        opens_to: Who may use the routes, if there are keys.
        waits: Whether a call waits for the engine or its lock.
    """

    name: str
    path: str
    opens_to: Literal["anyone", "apps", "administrator"] = "apps"
    waits: bool = True


_CONTEXTS = r"/v1/llmaas/apps/(?P<app>[^/]+)/contexts"
_IN_CONTEXT = re.compile(rf"{_CONTEXTS}/[^/]+")
_ROUTES = tuple(
    (re.compile(route.path), route)
    for route in (
        Route("chat", "/v1/chat/completions"),
        Route("completion", "/v1/(engines/copilot-codex/)?completions"),
        Route("embedding", "/v1/embeddings"),
        Route("call", rf"{_CONTEXTS}/[^/]+/call"),
        Route("contexts", rf"{_CONTEXTS}(/[^/]+)?", waits=False),
        Route("models", "/v1/models"),
        Route("tokens", "/extras/(tokenize(/count)?|detokenize)"),
        Route("overview", "/v1/llmaas/contexts", waits=False),
        Route("page", r"/(page/[^/]+)?", "anyone", waits=False),
        Route("status", "/v1/llmaas/status", "administrator", waits=False),
        Route("metrics", "/metrics", "administrator", waits=False),
        Route("health", "/health", "anyone", waits=False),
        Route("docs", r"/docs(/oauth2-redirect)?|/redoc|/openapi\.json", "anyone", waits=False),
    )
)
_ANSWERING = ("chat", "completion", "call")
"""Classes of routes whose calls have a first token, so that a latency can be promised."""
_JSON = re.compile(rb"application/([\w.-]+\+)?json\s*(;|$)", re.IGNORECASE)
_WITHOUT = b"x-llmaas-without"
_MOST_DISCARDED = 16 << 20
_MOST_CHECKS = 4
_SMALL_BODY = 16 << 10
_OTHER = Route("other", "", "administrator", waits=False)  # 404s and redirects


def route_of(path: str) -> tuple[Route, str]:
    """Return the class that a path belongs to, and its app, or an empty string."""
    for pattern, route in _ROUTES:
        if found := pattern.fullmatch(path.removesuffix("\n")):  # the server's `$` ignores it
            return route, found.groupdict().get("app", "")
    return _OTHER, ""


class RequestMiddleware:
    """ASGI middleware that checks requests and makes calls take turns."""

    def __init__(  # noqa: PLR0913  one parameter for each part
        self,
        app: App,
        *,
        admission: Admission,
        keys: ApiKeys,
        origins: OriginCheck,
        metrics: Metrics,
        grammars: Grammars,
        gateway: Gateway | None,
        max_body_bytes: int,
    ) -> None:
        """Wrap ``app``, which answers what ``gateway`` leaves to it."""
        self._app = app
        self._admission = admission
        self._keys = keys
        self._origins = origins
        self._metrics = metrics
        self._grammars = grammars
        self._gateway = gateway
        self._checks = anyio.CapacityLimiter(1)  # a check that waits its turn occupies no thread
        self._bodies = anyio.CapacityLimiter(1)  # large ones in turn, or the event loop would wait
        self._checking: Counter[str] = Counter()
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serve a request, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        route, owner = route_of(_path(scope))
        question, answer = Question(receive), Answer(send)
        try:
            await self._serve(route, owner, scope, question.receive, answer)
        except Refusal as refusal:
            await answer.refuse(refusal)
        except ClientDisconnect:
            answer.status = answer.status or 499  # usual in logs for a client that left
        finally:
            self._metrics.request(route.name, answer.status or 500)
        if answer.is_refused:  # sent first, because the client may never send the rest of its body
            if not header(scope, b"expect"):
                await question.discard(_MOST_DISCARDED)
            await answer.end()

    async def _serve(
        self, route: Route, owner: str, scope: Message, receive: Receive, answer: Answer
    ) -> None:
        self._origins.check(scope)
        app = scope[CALLER] = self._authorize(route, owner, scope)
        is_deletion = route.name == "contexts" and scope["method"] == "DELETE"
        is_call = is_deletion or (route.waits and scope["method"] in ("GET", "POST"))
        if self._admission.is_stopping and route.name not in ("health", "metrics"):
            raise stopping()
        cloud = self._gateway
        if cloud is not None and not cloud.may_answer(route.name, app, scope, answer):
            cloud = None
        body, levels, promise = b"", Levels(), NO_PROMISE
        if is_call:
            if cloud is None:
                self._admission.check(app)  # refuse before reading the body
            _declining(scope)
            levels, promise = _levels(scope), _promise(scope)
        if scope["method"] == "POST":
            body = await self._read(scope, receive)
            large = self._bodies if len(body) > _SMALL_BODY else None
            checked = await anyio.to_thread.run_sync(check_body, route.name, body, limiter=large)
            levels, promise = checked.levels.over(levels), checked.promise.over(promise)
            if cloud is not None:
                asking = cloud.answer(route.name, app, body, answer)
                if await self._elsewhere(app, receive, asking):
                    return
            if checked.wanted:
                with serving_context(None, app or None):
                    await self._check_grammars(app, checked.wanted)
        if is_call:
            known = promise.over(configured_promise(app or None))
            due = known if route.name in _ANSWERING else NO_PROMISE
            call = self._admission.enter(app, due, context=_context(scope))
            with at_levels(levels), promising(promise), noting() as answer.notes:
                await self._call(call, scope, body, receive, answer)
        else:
            await self._app(scope, _replay(body, receive), answer.send)

    async def _elsewhere(self, app: str, receive: Receive, answer: Awaitable[bool]) -> bool:
        """Wait for ``answer``, which does not need the engine, unless the client leaves.

        Raises:
            Refusal: The service ended the call, or the cloud failed in the middle of a stream.
        """
        call = Call(app)
        watcher = asyncio.create_task(_watch(receive, asyncio.Event(), call))
        self._admission.elsewhere.add(call)
        is_answered = False
        try:
            with call.scope:
                is_answered = await answer
        finally:
            watcher.cancel()
            self._admission.elsewhere.discard(call)
        if call.is_over and not is_answered:
            raise call.refusal or ClientDisconnect
        return is_answered

    def _authorize(self, route: Route, owner: str, scope: Message) -> str:
        """Return the app that calls, or an empty string if it is unknown.

        Raises:
            Refusal: The key does not open this route.
        """
        if route.opens_to == "anyone":
            return owner
        app = self._keys.caller(header(scope, b"authorization"))
        if app is None:
            return owner
        if route.opens_to == "administrator":
            raise Refusal(403, f"This needs the administrator's key, not that of app {app!r}.")
        if owner not in ("", app):
            raise Refusal(403, f"This is the key of app {app!r}; it does not open {owner!r}.")
        return app

    async def _check_grammars(self, app: str, wanted: list[Wanted]) -> None:
        """Check grammars; new ones one at a time, of which an app may have only a few waiting.

        Raises:
            Refusal: A grammar costs too much, or the app has too many new grammars waiting.
        """
        if self._grammars.know(wanted):
            await run_in_threadpool(self._grammars.check, wanted)
            return
        if self._checking[app] >= _MOST_CHECKS:
            message = f"{_MOST_CHECKS} new grammars of this app are being checked, the limit."
            raise Refusal(429, message, "rate_limit_exceeded")
        self._checking[app] += 1
        try:
            await anyio.to_thread.run_sync(self._grammars.check, wanted, limiter=self._checks)
        finally:
            self._checking[app] -= 1
            self._checking += Counter()  # drops apps whose count is 0

    async def _read(self, scope: Message, receive: Receive) -> bytes:
        # browsers send bodies of other types from any page without a preflight request
        if not _JSON.match(kind := header(scope, b"content-type")):
            found = kind.decode("latin-1")
            raise Refusal(415, f"Content-Type must be application/json, found {found!r}.")
        most = self._max_body_bytes
        declared = header(scope, b"content-length")
        body = bytearray()
        if not (declared.isdigit() and int(declared) > most):
            more = True
            while more and len(body) <= most:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnect
                body += message.get("body", b"")
                more = message.get("more_body", False)
            if len(body) <= most:
                return bytes(body)
        raise Refusal(413, f"The body is longer than {most} bytes, service.max_body_bytes.")

    async def _call(
        self, call: Call, scope: Message, body: bytes, receive: Receive, answer: Answer
    ) -> None:
        """Wait for the call's turn and run it, unless the client leaves.

        Raises:
            Refusal: The service ended the call, or a stream failed.
        """
        left = asyncio.Event()
        watcher = asyncio.create_task(_watch(receive, left, call))
        try:
            with call.scope:
                await call.turn.wait()
                begun = self._admission.begun(call)
                self._metrics.waited(begun.waited_s)
                named = serving_context(None, call.app or None)
                checked = checked_by(functools.partial(check_wanted, call))
                with named, _declining(scope), promising(begun), checked:
                    await self._app(scope, _replay(body, _when(left)), answer.send)
                await answer.flush()
        except BaseException as error:
            if not call.is_over:
                if answer.is_stream and isinstance(error, Exception):
                    raise stream_failure(body, error) from error
                raise
        finally:
            watcher.cancel()
            try:
                if self._admission.has_begun(call) and is_open(call.completion):
                    with anyio.CancelScope(shield=True):
                        await run_in_threadpool(self._admission.close, call)
            finally:
                call.constrain(None)
                self._admission.leave(call, answer.notes.get("deadlines"))
        if call.is_over:
            raise call.refusal or ClientDisconnect


def _levels(scope: Message) -> Levels:
    """Return what headers X-LLMaaS-Level and X-LLMaaS-Prompt-Share ask for."""
    levels = _asked(scope, "X-LLMaaS-Level", levels_in_header, check_levels) or Levels()
    share = _asked(scope, "X-LLMaaS-Prompt-Share", share_in_header, check_share)
    return levels if share is None else levels.over(share)


def _promise(scope: Message) -> Promise:
    """Return the promise that header X-LLMaaS-SLO asks for."""
    return _asked(scope, "X-LLMaaS-SLO", promise_in_header, check_promise) or NO_PROMISE


def _asked(
    scope: Message, name: str, parse: Callable[[str], _Asked], check: Callable[[_Asked], None]
) -> _Asked | None:
    """Return what a header asks for; None if it is missing or empty.

    Raises:
        Refusal: The header is malformed, or what it asks for is not available.
    """
    text = header(scope, name.lower().encode()).decode("latin-1")
    if not text:
        return None
    try:
        found = parse(text)
        check(found)
    except ConfigError as error:
        raise Refusal(400, f"{name}: {error}") from error
    return found


def _declining(scope: Message) -> AbstractContextManager[None]:
    """Return a context manager that turns off the plugins named in header X-LLMaaS-Without.

    Raises:
        Refusal: A named plugin is not installed.
    """
    said = [value for name, value in scope["headers"] if name == _WITHOUT]
    names = [name.strip() for name in b",".join(said).decode("latin-1").split(",")]
    try:
        return without(*filter(None, names))
    except UnknownPluginError as error:
        raise Refusal(400, f"X-LLMaaS-Without: {error}") from error


def _context(scope: Message) -> str:
    """Return the path of the persistent context that a call works in; empty if there is none."""
    found = _IN_CONTEXT.match(_path(scope))
    return "" if found is None else found[0]


def _path(scope: Message) -> str:
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    return path.removeprefix(root) if root and path.startswith(f"{root}/") else path


def _replay(body: bytes, then: Receive) -> Receive:
    """Return a ``receive`` that replays a body that was already read, then calls ``then``."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        return messages.pop() if messages else await then()

    return receive


def _when(left: asyncio.Event) -> Receive:
    """Return a ``receive`` that reports the client's disconnect once it has left."""

    async def receive() -> Message:
        await left.wait()
        return {"type": "http.disconnect"}

    return receive


async def _watch(receive: Receive, left: asyncio.Event, call: Call) -> None:
    """End the call when its client disconnects, whether the call waits or runs."""
    while (await receive())["type"] != "http.disconnect":
        pass
    left.set()
    call.end()

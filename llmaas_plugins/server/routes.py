"""Extra routes on llama_cpp.server's own FastAPI app: persistent contexts over HTTP.

The OpenAI routes stay as they are; their stateless requests find stored contexts by content. The
middleware checks keys and limits, so nothing here does.
"""

# No `from __future__ import annotations`: FastAPI reads the types of nested functions.

import contextlib
import json
from collections.abc import AsyncGenerator
from dataclasses import asdict
from typing import Annotated, Any

import anyio
from fastapi import APIRouter, HTTPException, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema
from sse_starlette.sse import EventSourceResponse
from starlette.concurrency import run_in_threadpool

from llmaas_hooks import ConfigError, Levels, LimitError, PluginError, StoreError
from llmaas_patches.internals import server_engine
from llmaas_plugins.chats.text_limit import TextTooLongError, check_text
from llmaas_plugins.server.admission import Admission
from llmaas_plugins.server.body_checks import LARGEST_FLOAT, LONGEST_STOP, MOST_STOPS
from llmaas_plugins.server.exchange import CALLER
from llmaas_plugins.server.gateway import Gateway
from llmaas_plugins.server.metrics import CONTENT_TYPE_LATEST, Metrics
from llmaas_plugins.server.refusal import error_body
from llmaas_plugins.server.upstream import engine_lock
from llmaas_plugins.service.level_arguments import levels_of
from llmaas_plugins.service.service import Context, LLMService

__all__ = ["make_router"]

_SHARE = {"type": "number", "minimum": 0.2, "maximum": 1.0}
_LEVEL = {
    "anyOf": [_SHARE, {"type": "object", "properties": {"prefill": _SHARE, "decode": _SHARE}}],
    "description": "Share of an elastic model, for all tokens or for prompt and answer each.",
}


class NewContextBody(BaseModel):
    """Body of ``POST …/contexts``."""

    model_config = ConfigDict(extra="forbid")

    system: str | None = Field(default=None, description="System prompt.")


class CallBody(BaseModel):
    """Body of ``POST …/call``."""

    model_config = ConfigDict(extra="forbid")

    prompt: str
    stream: bool = False
    max_tokens: int | None = Field(default=None, ge=1, lt=1 << 31)
    temperature: float | None = Field(default=None, ge=0, le=LARGEST_FLOAT)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-(1 << 31), lt=1 << 31)
    min_p: float | None = Field(default=None, ge=0, le=1)
    repeat_penalty: float | None = Field(default=None, gt=0, le=LARGEST_FLOAT)
    seed: int | None = Field(default=None, ge=-(1 << 31), lt=1 << 32)
    stop: list[Annotated[str, Field(max_length=LONGEST_STOP)]] | None = Field(
        default=None, max_length=MOST_STOPS
    )
    level: Annotated[Levels, BeforeValidator(levels_of), WithJsonSchema(_LEVEL)] = Levels()
    prompt_share: Any = Field(
        default=None,
        description="Share of the prompt's tokens to read, such as 0.5; 1 forbids to shorten it. "
        "The middleware reads it.",
    )
    slo: Any = Field(
        default=None,
        description='Latency that is asked for, such as {"ttft": "300 ms", "tpot": "60 %"}; the '
        "middleware reads it.",
    )

    def arguments(self) -> dict[str, Any]:
        """Return the given fields as arguments of ``Context.call``."""
        others = {"prompt", "stream", "level", "prompt_share", "slo"}
        sampling = self.model_dump(exclude=others, exclude_none=True)
        return {"level": self.level, **sampling}


class _Report(JSONResponse):
    """JSON in ASCII: plugins name files and errors, whose texts may be no Unicode."""

    def render(self, content: Any) -> bytes:
        """Return the body."""
        return json.dumps(content, allow_nan=False).encode()


def make_router(
    service: LLMService, admission: Admission, metrics: Metrics, gateway: Gateway | None
) -> APIRouter:
    """Return the routes of ``service``, whose calls ``admission`` admits."""
    router = APIRouter()
    router.include_router(
        _contexts(service, admission, metrics), prefix="/v1/llmaas/apps/{app}/contexts"
    )

    @router.get("/v1/llmaas/contexts", response_class=_Report)
    def overview(request: Request) -> dict[str, Any]:
        app = request.scope[CALLER] or None  # the administrator's key belongs to no app
        with _http_errors():
            return {"app": app, **service.overview(app)}

    @router.get("/v1/llmaas/status", response_class=_Report)
    async def status() -> dict[str, Any]:
        found = await run_in_threadpool(service.status)
        return {
            **found,
            "queue": len(admission),
            **admission.report(),
            **({} if gateway is None else {"cloud": gateway.status()}),
        }

    @router.get("/health")
    @router.head("/health")
    async def health(response: Response) -> dict[str, Any]:
        if not admission.is_stopping:
            return {"status": "ok"}
        response.status_code = 503
        running = admission.n_running + len(admission.elsewhere)
        return {"status": "stopping", "running": running, "waiting": len(admission.waiting)}

    @router.get("/metrics")
    async def prometheus() -> Response:
        return Response(await run_in_threadpool(metrics.as_text), media_type=CONTENT_TYPE_LATEST)

    return router


def _contexts(service: LLMService, admission: Admission, metrics: Metrics) -> APIRouter:
    router = APIRouter()

    @router.post("", status_code=201)
    def new_context(app: str, body: NewContextBody) -> dict[str, Any]:
        with _http_errors():
            if body.system:
                check_text(server_engine(), body.system.encode())
            return service.bind(app).new_context(body.system).record().summary()

    @router.get("")
    def contexts(app: str) -> list[dict[str, Any]]:
        with _http_errors():
            return [record.summary() for record in service.bind(app).records()]

    @router.get("/{context_id}")
    def context(app: str, context_id: str) -> dict[str, Any]:
        with _http_errors():
            return asdict(service.bind(app).context(context_id).record())

    @router.delete("/{context_id}")
    async def delete(app: str, context_id: str) -> dict[str, int]:
        with _http_errors():
            found = Context(context_id, service.bind(app))  # not looked up: it may be half deleted
            async with engine_lock():
                return {"freed_bytes": await run_in_threadpool(found.delete)}

    @router.post("/{context_id}/call", response_model=None)
    async def call(
        app: str, context_id: str, body: CallBody
    ) -> dict[str, Any] | EventSourceResponse:
        with _http_errors():
            found = service.bind(app).context(context_id)
            if body.stream:
                return EventSourceResponse(_events(found, body, admission, metrics))
            async with engine_lock():
                reply = await run_in_threadpool(found.call, body.prompt, **body.arguments())
            metrics.replied(reply)
            return asdict(reply)

    return router


async def _events(
    context: Context, body: CallBody, admission: Admission, metrics: Metrics
) -> AsyncGenerator[dict[str, str]]:
    """Yield server-sent events: ``{"text": …}`` pieces, then a ``done`` event with the reply."""
    async with engine_lock():
        stream = context.stream(body.prompt, **body.arguments())
        stream = admission.shared(admission.running, stream, is_last=True)
        reply: list[Any] = []

        def step() -> str | None:
            try:
                return next(stream)
            except StopIteration as end:
                reply.append(end.value)
                return None

        try:
            while (piece := await run_in_threadpool(step)) is not None:
                yield {"data": json.dumps({"text": piece})}
            metrics.replied(reply[0])
            yield {"event": "done", "data": json.dumps(asdict(reply[0]))}
        except Exception as error:
            if (status := _status(error)) is None:
                raise
            yield {"event": "error", "data": json.dumps(error_body(status, str(error)))}
        finally:
            with anyio.CancelScope(shield=True):
                await run_in_threadpool(stream.close)


@contextlib.contextmanager
def _http_errors() -> Any:
    """Turn our errors into HTTP statuses."""
    try:
        yield
    except Exception as error:
        if (status := _status(error)) is None:
            raise
        raise HTTPException(status, str(error)) from error


def _status(error: Exception) -> int | None:
    """Return the HTTP status for ``error``, or None if only a traceback in the log explains it."""
    if isinstance(error, PluginError) and isinstance(error.__cause__, StoreError):
        return 503  # the disk failed, so the context cannot be deleted now
    kinds: dict[type[Exception], int] = {TextTooLongError: 400, LookupError: 404, LimitError: 429}
    kinds |= {ConfigError: 422, TypeError: 422, StoreError: 503}
    return next((status for kind, status in kinds.items() if isinstance(error, kind)), None)

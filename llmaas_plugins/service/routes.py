"""Extra routes on llama_cpp.server's own FastAPI app: persistent contexts over HTTP.

The OpenAI routes stay as they are; stateless requests there find stored contexts by content.
"""

# No `from __future__ import annotations`: FastAPI reads the types of nested functions.

import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import asdict
from typing import Any

import anyio
from fastapi import APIRouter, Depends, HTTPException
from llama_cpp.server import app as server
from pydantic import BaseModel, ConfigDict, Field
from sse_starlette.sse import EventSourceResponse
from starlette.concurrency import run_in_threadpool

from llmaas_hooks import ConfigError, LimitError
from llmaas_plugins.service.service import Context, LLMService

__all__ = ["make_router", "server_engine"]


class NewContext(BaseModel):
    """Body of ``POST …/contexts``."""

    model_config = ConfigDict(extra="forbid")

    system: str | None = Field(default=None, description="System prompt.")


class Call(BaseModel):
    """Body of ``POST …/call``."""

    model_config = ConfigDict(extra="forbid")

    prompt: str
    stream: bool = False
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = None
    min_p: float | None = Field(default=None, ge=0, le=1)
    repeat_penalty: float | None = Field(default=None, gt=0)
    seed: int | None = None
    stop: list[str] | None = None

    def sampling(self) -> dict[str, Any]:
        """What was given, as arguments of ``Context.call``."""
        return self.model_dump(exclude={"prompt", "stream"}, exclude_none=True)


def server_engine() -> Any:
    """The ``Llama`` that llama_cpp.server has loaded; call it while its lock is held."""
    return server._llama_proxy()


def make_router(service: LLMService) -> APIRouter:
    """Routes under ``/v1/llmaas`` for ``service``, behind the server's own API key."""
    router = APIRouter(prefix="/v1/llmaas", dependencies=[Depends(server.authenticate)])
    queue = _Queue(service.config.max_queue)

    @router.get("/status")
    async def status() -> dict[str, Any]:
        return {**await run_in_threadpool(service.status), "queue": queue.length}

    @router.post("/apps/{app}/contexts", status_code=201)
    def new_context(app: str, body: NewContext) -> dict[str, Any]:
        with _http_errors():
            return service.bind(app).new_context(body.system).record().summary()

    @router.get("/apps/{app}/contexts")
    def contexts(app: str) -> list[dict[str, Any]]:
        with _http_errors():
            return [context.record().summary() for context in service.bind(app).contexts()]

    @router.get("/apps/{app}/contexts/{context_id}")
    def context(app: str, context_id: str) -> dict[str, Any]:
        with _http_errors():
            return asdict(service.bind(app).context(context_id).record())

    @router.delete("/apps/{app}/contexts/{context_id}")
    async def delete(app: str, context_id: str) -> dict[str, int]:
        with _http_errors():
            found = service.bind(app).context(context_id)
            async with queue.engine():
                return {"freed_bytes": await run_in_threadpool(found.delete)}

    @router.post("/apps/{app}/contexts/{context_id}/call", response_model=None)
    async def call(app: str, context_id: str, body: Call) -> dict[str, Any] | EventSourceResponse:
        with _http_errors():
            found = service.bind(app).context(context_id)
            queue.check()
            if body.stream:
                return EventSourceResponse(_events(queue, found, body))
            async with queue.engine():
                reply = await run_in_threadpool(found.call, body.prompt, **body.sampling())
            return asdict(reply)

    return router


class _Queue:
    """Calls that run or wait for the engine, whose lock belongs to llama_cpp.server."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.length = 0

    def check(self) -> None:
        if self.length > self._most:
            raise LimitError(
                f"{self.length} calls are running or waiting, the limit is {self._most}. "
                "Try again later."
            )

    @contextlib.asynccontextmanager
    async def engine(self) -> AsyncIterator[None]:
        self.length += 1
        try:
            async with contextlib.asynccontextmanager(server.get_llama_proxy)():
                yield
        finally:
            self.length -= 1


async def _events(queue: _Queue, context: Context, body: Call) -> AsyncGenerator[dict[str, str]]:
    """Server-sent events: ``{"text": …}`` pieces, then one ``done`` event with the whole reply."""
    async with queue.engine():
        stream = context.stream(body.prompt, **body.sampling())
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
            yield {"event": "done", "data": json.dumps(asdict(reply[0]))}
        except Exception as error:
            if (status := _status(error)) is None:
                raise
            yield {"event": "error", "data": json.dumps({"error": str(error), "status": status})}
        finally:
            with anyio.CancelScope(shield=True):
                await run_in_threadpool(stream.close)


@contextlib.contextmanager
def _http_errors() -> Any:
    """Our errors as HTTP statuses."""
    try:
        yield
    except Exception as error:
        if (status := _status(error)) is None:
            raise
        raise HTTPException(status, str(error)) from error


def _status(error: Exception) -> int | None:
    """The HTTP status that says what ``error`` does, or None for what is not the client's doing."""
    kinds = {LookupError: 404, LimitError: 429, ConfigError: 422, TypeError: 422}
    return next((status for kind, status in kinds.items() if isinstance(error, kind)), None)

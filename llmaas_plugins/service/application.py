"""llama_cpp.server's FastAPI app with our routes, behind the gate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware import Middleware
from fastapi.responses import JSONResponse
from llama_cpp.server.app import create_app
from starlette.exceptions import HTTPException

from llmaas_plugins.service.confinement import confine_grammars
from llmaas_plugins.service.gate import Gate
from llmaas_plugins.service.grammars import Grammars
from llmaas_plugins.service.keys import Keys
from llmaas_plugins.service.line import Line
from llmaas_plugins.service.metrics import Metrics
from llmaas_plugins.service.refusal import error_body, mistakes
from llmaas_plugins.service.routes import make_router
from llmaas_plugins.service.service import LLMService
from llmaas_plugins.service.upstream import OpenCompletion, explain_mistakes, server_engine

__all__ = ["explain_refusals", "make_application"]


def make_application(  # noqa: PLR0913, PLR0917  these are its parts
    server_settings: Any,
    model_settings: Any,
    service: LLMService,
    keys: Keys,
    line: Line,
    metrics: Metrics,
    grammars: Grammars,
) -> Any:
    """Load the model and put the app together."""
    settings = server_settings.model_copy(update={"api_key": None})  # the gate looks at keys
    app = create_app(server_settings=settings, model_settings=[model_settings])
    app.include_router(make_router(service, line, metrics))
    explain_mistakes()
    confine_grammars(grammars, line.refuse_running)
    explain_refusals(app)
    gate = Middleware(
        Gate,
        line=line,
        keys=keys,
        metrics=metrics,
        completion=OpenCompletion(server_engine()),
        grammars=grammars,
        max_body_bytes=int(service.config.max_body_bytes),
    )
    app.user_middleware.append(gate)  # the innermost: browsers' preflights are answered before
    return app


def explain_refusals(app: FastAPI) -> None:
    """Have FastAPI give its own refusals, and what fails in our routes, the form of all others."""

    @app.exception_handler(HTTPException)
    async def refused(_: Request, error: HTTPException) -> JSONResponse:
        return _answer(error.status_code, str(error.detail), error.headers)

    @app.exception_handler(RequestValidationError)
    async def mistaken(_: Request, error: RequestValidationError) -> JSONResponse:
        in_body = [found | {"loc": found["loc"][1:]} for found in error.errors()]
        return _answer(422, mistakes(in_body))

    @app.exception_handler(Exception)
    async def failed(_: Request, error: Exception) -> JSONResponse:
        return _answer(500, str(error))


def _answer(status: int, message: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    return JSONResponse(error_body(status, message), status, headers)

"""llama_cpp.server's FastAPI app with our routes, behind our middleware."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware import Middleware
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse
from llama_cpp import llama_cpp
from llama_cpp.server.app import create_app
from starlette.exceptions import HTTPException

from llmaas_patches.internals import server_engine
from llmaas_plugins.model.loading import load_errors
from llmaas_plugins.server.admission import Admission
from llmaas_plugins.server.confinement import confine_grammars
from llmaas_plugins.server.engine_options import check_adapter
from llmaas_plugins.server.grammars import Grammars
from llmaas_plugins.server.middleware import RequestMiddleware
from llmaas_plugins.server.page import make_page_router
from llmaas_plugins.server.refusal import error_body, mistakes
from llmaas_plugins.server.routes import make_router
from llmaas_plugins.server.upstream import (
    explain_mistakes,
    limit_texts,
    record_completions,
    share_engine,
)
from llmaas_plugins.service.service import LLMService

__all__ = ["explain_refusals", "make_application"]


def make_application(
    server_settings: Any,
    model_settings: Any,
    service: LLMService,
    grammars: Grammars,
    checks: Mapping[str, Any],
) -> Any:
    """Load the model and build the app; ``checks`` has keyword arguments of ``RequestMiddleware``.

    Raises:
        ConfigError: llama.cpp cannot load the model, or its adapter.
    """
    settings = server_settings.model_copy(update={"api_key": None})  # our middleware checks keys
    with load_errors(model_settings.model):
        app = create_app(server_settings=settings, model_settings=[model_settings])
    if model_settings.lora_path is not None:
        check_adapter(server_engine(), model_settings.lora_path)
    limit_texts(server_engine())
    admission: Admission = checks["admission"]
    record_completions(server_engine(), admission, _given(model_settings.seed))
    share_engine()
    app.include_router(make_router(service, admission, checks["metrics"], checks["gateway"]))
    app.include_router(make_page_router())
    explain_mistakes()
    confine_grammars(grammars, admission.refuse_running, lambda: admission.running)
    explain_refusals(app)
    config = service.config
    middleware = [found for found in app.user_middleware if found.cls is not CORSMiddleware]
    own = Middleware(
        RequestMiddleware,
        **checks,
        grammars=grammars,
        max_body_bytes=int(config.max_body_bytes),
    )
    app.user_middleware[:] = [*_for_pages(config.allowed_origins), *middleware, own]
    return app


def _given(seed: int) -> int | None:
    """Return the seed that the operator chose, or None for a random one, as llama.cpp has it."""
    return None if seed % (1 << 32) == llama_cpp.LLAMA_DEFAULT_SEED else seed


def _for_pages(origins: tuple[str, ...]) -> list[Middleware]:
    """Let pages of ``origins`` read answers in browsers (CORS).

    This middleware is the outermost, because browsers send preflight requests without a key.
    """
    if not origins:
        return []
    allowed = list(origins)
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=allowed,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["X-LLMaaS-Answered-By", "X-LLMaaS-Notes"],
        )
    ]


def explain_refusals(app: FastAPI) -> None:
    """Give FastAPI's own refusals, and failures in our routes, the form of all other refusals."""

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

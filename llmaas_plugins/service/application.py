"""llama_cpp.server's FastAPI app with our routes, behind the gate."""

from __future__ import annotations

from typing import Any

from fastapi.middleware import Middleware
from llama_cpp.server.app import create_app

from llmaas_plugins.service.gate import Gate
from llmaas_plugins.service.keys import Keys
from llmaas_plugins.service.line import Line
from llmaas_plugins.service.metrics import Metrics
from llmaas_plugins.service.routes import make_router
from llmaas_plugins.service.service import LLMService
from llmaas_plugins.service.upstream import OpenCompletion, explain_mistakes, server_engine

__all__ = ["make_application"]


def make_application(  # noqa: PLR0913, PLR0917  these are its parts
    server_settings: Any,
    model_settings: Any,
    service: LLMService,
    keys: Keys,
    line: Line,
    metrics: Metrics,
) -> Any:
    """Load the model and put the app together."""
    settings = server_settings.model_copy(update={"api_key": None})  # the gate looks at keys
    app = create_app(server_settings=settings, model_settings=[model_settings])
    app.include_router(make_router(service, line, metrics))
    explain_mistakes()
    gate = Middleware(
        Gate,
        line=line,
        keys=keys,
        metrics=metrics,
        completion=OpenCompletion(server_engine()),
        max_body_bytes=int(service.config.max_body_bytes),
    )
    app.user_middleware.append(gate)  # the innermost: browsers' preflights are answered before
    return app

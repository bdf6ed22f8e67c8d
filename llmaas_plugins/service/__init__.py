"""The LLM as a service for many apps: persistent contexts, limits, restarts (LLMS §3.1)."""

from __future__ import annotations

from llmaas_plugins.config import ServiceConfig
from llmaas_plugins.service.service import App, Context, LLMService, Reply

__all__ = ["App", "Context", "LLMService", "Reply", "ServiceConfig"]

"""A gateway to a stub of a cloud, asked in this process, and what it sent to its client."""

from __future__ import annotations

import asyncio
import json

import anyio
from stub_cloud import MODEL

from llmaas_plugins.cloud_config import CloudConfig
from llmaas_plugins.server.circuit_breaker import CircuitBreaker
from llmaas_plugins.server.cloud_client import CloudClient
from llmaas_plugins.server.exchange import Answer
from llmaas_plugins.server.gateway import Gateway
from llmaas_plugins.server.refusal import Refusal

KEY = "sk-very-secret-4711"
QUESTION = [{"role": "user", "content": "What is the capital of Norway?"}]
PATHS = {"chat": "/v1/chat/completions", "completion": "/v1/completions"}
APPS = {"mail": {"keep": True}, "diary": {"private": True}}


class Asking:
    """A gateway to a stub, and what it sent to its client."""

    def __init__(self, stub, **config):
        self.kept, self.now_s = [], 0.0
        given = {"base_url": stub.url, "model": MODEL, "key_env": "KEY", "timeout_s": 20}
        self.config = CloudConfig.model_validate(given | {"apps": APPS} | config)
        client = CloudClient(self.config, KEY)
        breaker = CircuitBreaker(lambda: self.now_s)
        self.gateway = Gateway(self.config, client, self._keep, breaker)

    def _keep(self, app, said):
        self.kept.append((app, list(said)))

    @property
    def counts(self):
        return {name: n for name, n in self.gateway.counts.items() if n}

    def ask(self, route="chat", app="", headers=(), leaves_after_s=None, leaves_at=None, **body):
        """Ask; return what the client got, or None if the local model would answer now.

        The client leaves after some seconds, or once it has a message that contains ``leaves_at``.
        """
        self.sent, self.refusal = [], None
        body = {"model": "mine", "messages" if route == "chat" else "prompt": QUESTION} | body

        async def send(message):
            self.sent.append(message)
            if leaves_at is not None and leaves_at in message.get("body", b""):
                self.scope.cancel()

        async def asked():
            self.answer = answer = Answer(send)
            scope = {"method": "POST", "path": PATHS[route], "headers": list(headers)}
            if not self.gateway.may_answer(route, app, scope, answer):
                return False
            try:
                with anyio.fail_after(leaves_after_s) as self.scope:
                    data = json.dumps(body).encode()
                    return await self.gateway.answer(route, app, data, answer)
            except Refusal as refusal:
                self.refusal = refusal
            return True

        if not asyncio.run(asked()):
            assert self.sent == []
            assert self.answer.cloud["answered_by"] == "local"
            return None
        assert self.answer.cloud == {"answered_by": "cloud"}
        return b"".join(message.get("body", b"") for message in self.sent)

    def reason(self, **given):
        """Ask; return why the local model answers."""
        assert self.ask(**given) is None
        return self.answer.cloud["reason"]

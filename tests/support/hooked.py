"""Plugins for tests of the hook manager."""

from __future__ import annotations

import numpy as np

from llmaas_hooks import (
    HookManager,
    Request,
    RequestStats,
    hookimpl,
)
from llmaas_hooks.testing import FakeEngine

STATS = RequestStats(3, 0, 1, 0.0, 0.1, 0.2)


class Saver:
    def __init__(self, freed=0):
        self.calls = []
        self.freed = freed

    @hookimpl
    def llmaas_kv_evict(self, context_id):
        self.calls.append(("evict", context_id))
        return self.freed

    @hookimpl
    def llmaas_status(self):
        return {"freed": self.freed}

    @hookimpl
    def llmaas_request_end(self, stats):
        self.calls.append(("end", stats))

    @hookimpl
    def llmaas_shutdown(self):
        self.calls.append(("shutdown",))


class Failing:
    def __init__(self, error=None):
        self.error = error or ZeroDivisionError("oops")

    @hookimpl
    def llmaas_context_create(self, create):
        self.deeper()

    @hookimpl
    def llmaas_level(self, request):
        self.deeper()

    @hookimpl
    def llmaas_kv_restore(self, request):
        self.deeper()

    @hookimpl
    def llmaas_weights(self, load):
        self.deeper()

    @hookimpl
    def llmaas_native_context(self, context):
        self.deeper()

    @hookimpl
    def llmaas_kv_evict(self, context_id):
        self.deeper()

    @hookimpl
    def llmaas_status(self):
        self.deeper()

    @hookimpl
    def llmaas_shutdown(self):
        self.deeper()

    def deeper(self):
        raise self.error


def manager(on_error="raise", **plugins):
    hooks = HookManager(on_error)
    for name, plugin in plugins.items():
        hooks.register(name, plugin)
    return hooks


def request(**facts):
    values = {"engine": FakeEngine(), "tokens": np.arange(3, dtype=np.int32), "context_id": None}
    return Request(**values | facts)

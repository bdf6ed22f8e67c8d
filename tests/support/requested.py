"""A plugin that records requests, and the prompt that they are made of."""

from __future__ import annotations

import threading

from llmaas_hooks import hookimpl

PROMPT = [1, 400, 401, 402, 403, 404]


class Recorder:
    def __init__(self):
        self.events = []
        self.requests = []
        self.stats = []
        self.saves = []

    @hookimpl
    def llmaas_request_begin(self, request):
        self.events.append("begin")
        self.requests.append(request)

    @hookimpl
    def llmaas_kv_restore(self, request):
        self.events.append("restore")

    @hookimpl
    def llmaas_kv_save(self, request, tokens):
        self.events.append("save")
        self.saved = tokens
        self.saves.append(tokens.tolist())

    @hookimpl
    def llmaas_request_end(self, request, stats):
        self.ended_on = threading.current_thread()
        self.events.append("end")
        self.stats.append(stats)


def greedy(llama, tokens, n, **kwargs):
    found = []
    for token in llama.generate(tokens, temp=0.0, **kwargs):
        found.append(token)
        if len(found) == n:
            break
    return found


ONCE = ["begin", "restore", "save", "end"]

"""Prepared models at levels: the batches that plugins see, and answers."""

from __future__ import annotations

from switching import PROMPT, ask

from llmaas_hooks import hookimpl

TENTHS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)
TABLES = ("uniform", "searched")
N = len(PROMPT)


class Recorder:
    """Plugin that records batches by context as (level, tokens), and can change requests."""

    def __init__(self, levels=None):
        self.levels = levels
        self.contexts = {}
        self.batches = {}

    @hookimpl
    def llmaas_level(self, request):
        return self.levels

    @hookimpl
    def llmaas_native_context(self, context):
        self.contexts[context.ctx] = context
        self.batches[context.ctx] = []

    @hookimpl
    def llmaas_decode(self, step):
        share = TENTHS[self.contexts[step.ctx].level]
        self.batches[step.ctx].append((share, step.n_tokens))

    def taken(self, llama):
        """Return an engine's batches since the last call."""
        found = self.batches[int(llama.ctx)][:]
        self.batches[int(llama.ctx)].clear()
        return found


def report(suite):
    return suite.status()["plugins"]["elastic"]


def answered(llama, n=3):
    """Return the logits of an answer to a prompt that has no cells yet."""
    llama.reset()
    return ask(llama, PROMPT, n)[1]

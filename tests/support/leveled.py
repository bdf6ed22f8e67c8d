"""Prepared models at levels: the batches that plugins see, and answers."""

from __future__ import annotations

from switching import PROMPT, ask

from llmaas_hooks import hookimpl
from llmaas_plugins.elastic.latency import Curves, Latency, Machine, latency_path

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


def slow(level):
    """Return times of a machine on which a token takes ``level`` seconds, so that all fit."""
    return tuple(1000 * level * n for n in (1, 1000))


def write_times(model, scale=1.0, levels=TENTHS):
    """Write a table in which each prompt token, and each further one, takes ``level`` seconds."""
    curves = {
        "n_tokens": (1, 1000),
        "spread_ms": (((0.0, 0.0),) * len(levels),),
        "held": (500,),
    }
    ttft = tuple(tuple(scale * ms for ms in slow(level)) for level in levels)
    held = tuple((scale * 500_000 * level,) for level in levels)
    flat = tuple((scale * 1000 * level,) * 2 for level in levels)
    Latency(
        model=model.name,
        table="uniform",
        machine=Machine.this(),
        levels=levels,
        threads=(1,),
        ttft=Curves(ms=(ttft,), held_ms=(held,), **curves),
        tpot=Curves(ms=(flat,), held_ms=(tuple(row[:1] for row in flat),), **curves),
    ).save(latency_path(model, "uniform"))

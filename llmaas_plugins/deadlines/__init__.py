"""Requests name their latency; each gets the widest levels that keep it (ElastiLM §2.1, §3.1).

    from llmaas_plugins import deadlines

    with deadlines.slo(ttft="300 ms", tpot="60 ms"):
        llm("Once upon a time")

``planner`` chooses levels from measured times. ``correction`` follows a machine that is faster or
slower than when it was measured.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

from llmaas_hooks import ConfigError, Limit, Promise, request_scope

__all__ = ["slo"]


def slo(ttft: str | None = None, tpot: str | None = None) -> AbstractContextManager[None]:
    """Ask for a latency of the requests started inside the block.

    In nested blocks the inner limit counts, separately for each of the two. Without the plugin, the
    block has no effect.

    Args:
        ttft: Longest time from a call to its first token: ``300 ms``, ``1.5 s``, or a share of the
            time that the whole model takes for the whole prompt, ``60 %``.
        tpot: Longest mean time of each further token, in the same forms.

    Raises:
        ConfigError: No limit is given, or one of another form.
    """
    limits = [None if one is None else Limit.of(one) for one in (ttft, tpot)]
    promise = Promise(limits[0], limits[1])
    if not promise:
        raise ConfigError('deadlines.slo() needs a limit: slo(ttft="300 ms"), or slo(tpot="60 %")')
    return request_scope.promising(promise)

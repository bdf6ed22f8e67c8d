"""One run of a workload, in a process of its own."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, NamedTuple

import numpy as np

from llmaas_eval.division.workloads import Turn
from llmaas_plugins.machine import peak_bytes

__all__ = ["Job", "run"]

_REPORTS = ("memory", "flash_weights", "kv_chunks")


class Job(NamedTuple):
    """Run of a workload.

    Attributes:
        model: GGUF file.
        config: Configuration of the suite.
        n_ctx: Tokens of the engine's context.
        lengths: Tokens of each context before the first turn.
        turns: The requests.
    """

    model: str
    config: Mapping[str, Any]
    n_ctx: int
    lengths: Sequence[int]
    turns: Sequence[Turn]


def run(job: Job) -> dict[str, Any]:
    """Fill the contexts, make the requests, and return their times and the memory.

    Returns:
        ``fill_s``, ``turn_s`` of each request, ``peak_bytes`` of the process, the tokens that were
        generated, and the memory's ``status``.
    """
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        return process.submit(_run, job).result()


def _run(job: Job) -> dict[str, Any]:
    from llama_cpp import Llama

    from llmaas_plugins import activate

    rng = np.random.default_rng(0)
    said = [rng.integers(300, 1000, n).tolist() for n in job.lengths]
    with activate(job.config) as suite:
        llama = Llama(job.model, n_ctx=job.n_ctx, verbose=False)
        try:
            started = time.perf_counter()
            for i in range(len(said)):
                _turn(llama, said, Turn(i, 0, 1), rng)
            fill_s = time.perf_counter() - started
            turn_s = []
            for turn in job.turns:
                started = time.perf_counter()
                _turn(llama, said, turn, rng)
                turn_s.append(time.perf_counter() - started)
            status = suite.status()["plugins"]
        finally:
            llama.close()
    return {
        "fill_s": fill_s,
        "turn_s": turn_s,
        "tokens": [tokens[-64:] for tokens in said],
        "peak_bytes": peak_bytes(),
        "status": {name: status[name] for name in _REPORTS if name in status},
    }


def _turn(llama: Any, said: list[list[int]], turn: Turn, rng: np.random.Generator) -> None:
    """Make a request in a context, and add its prompt and its answer to what was said there."""
    from llmaas_hooks import serving_context

    tokens = said[turn.context]
    tokens += rng.integers(300, 1000, turn.n_prompt).tolist()
    with serving_context(None, f"app {turn.context}"):
        stream = llama.generate(tokens, temp=0.0)
        try:
            answer = [next(stream) for _ in range(turn.n_answer)]
        finally:
            stream.close()
    tokens += answer

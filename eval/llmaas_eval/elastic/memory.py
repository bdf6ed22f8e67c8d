"""Peak memory of a process that has a model in several widths, one way or the other."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor

from llmaas_eval.batches import batches, loaded
from llmaas_eval.elastic.engine import FULL, Claimer, Variant
from llmaas_eval.inference import peak_bytes
from llmaas_plugins import activate

__all__ = ["peak_with"]

_N_PROMPT, _N_TOKENS = 512, 4


def peak_with(variants: Sequence[Variant], *, is_stock: bool) -> int:
    """The most memory of a process with all these models, each used at all of its levels.

    Args:
        variants: Models, loaded one after the other and kept.
        is_stock: Whether it is stock llama.cpp; it knows no levels.
    """
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn) as process:
        return process.submit(_peak, list(variants), is_stock).result()


def _peak(variants: list[Variant], is_stock: bool) -> int:
    claimer = Claimer()
    with contextlib.ExitStack() as stack:
        if not is_stock:
            config = {"plugins": {}, "on_error": "raise"}
            stack.enter_context(activate(config, {"eval": claimer}))
        for variant in variants:
            claimer.claims = variant.claims()
            ctx = stack.enter_context(batches(stack.enter_context(loaded(variant.path))))
            for level in [FULL] if is_stock else range(len(variant.levels)):
                if not is_stock:
                    claimer.contexts[-1].level = level
                ctx.clear()
                ctx.prefill(_N_PROMPT)
                ctx.generate(_N_TOKENS)
        return peak_bytes()

"""Perplexity measured with the engine itself, at several widths of one loaded model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import llama_cpp
import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from llmaas_eval.batches import loaded
from llmaas_eval.elastic.readings import Reading, read_window
from llmaas_eval.elastic.texts import Windows
from llmaas_eval.evaluated import log_probabilities
from llmaas_hooks import WeightClaim, hookimpl
from llmaas_hooks.native import NativeContext
from llmaas_plugins import activate
from llmaas_plugins.elastic.parts import part_claims
from llmaas_plugins.elastic.units import Blocks, Widths

__all__ = ["FULL", "Claimer", "Reader", "Variant", "opened", "readings"]

FULL = -1
"""The native level at which all units of a model are in use."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A model file and the widths to measure it at.

    Attributes:
        path: GGUF file.
        blocks: Units of the model; None if only the whole model is measured.
        levels: Widths by level.
        biases: Biases to add to a weight's product, by weight; float32, ``(n_levels, n_embd)``.
    """

    path: Path
    blocks: Blocks | None = None
    levels: Sequence[Widths] = ()
    biases: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)

    def claims(self) -> list[WeightClaim]:
        """Return the weight claims that give the engine these levels; none for a whole model."""
        if self.blocks is None:
            return []
        return part_claims(self.blocks, self.levels, self.biases)


class Claimer:
    """Plugin that claims weights of the next model and keeps native contexts.

    Attributes:
        claims: Claims for the model that is loaded next.
        contexts: All native contexts so far; the newest is last.
    """

    def __init__(self) -> None:
        """Start without claims and contexts."""
        self.claims: list[WeightClaim] = []
        self.contexts: list[NativeContext] = []

    @hookimpl
    def llmaas_weights(self) -> list[WeightClaim]:
        """Return ``claims``."""
        return self.claims

    @hookimpl
    def llmaas_native_context(self, context: NativeContext) -> None:
        """Append ``context`` to ``contexts``."""
        self.contexts.append(context)


class Reader:
    """A model's context on one thread, at a level that can be chosen for each text."""

    def __init__(self, ctx: int, context: NativeContext) -> None:
        """Use the ``llama_context`` at address ``ctx``, with its native context."""
        self._ctx, self._context = ctx, context
        self._memory = llama_cpp.llama_get_memory(ctx)
        vocab = llama_cpp.llama_model_get_vocab(llama_cpp.llama_get_model(ctx))
        self._n_vocab = llama_cpp.llama_vocab_n_tokens(vocab)

    def log_p(self, tokens: NDArray[np.int32], level: int) -> NDArray[np.float32]:
        """Return log probabilities after each token, shape ``(n_tokens, n_vocab)``.

        The sequence starts in an empty context.

        Raises:
            RuntimeError: ``llama_decode`` failed.
        """
        self._context.level = level
        llama_cpp.llama_memory_clear(self._memory, False)
        return log_probabilities(self._ctx, self._n_vocab, [(tokens.tolist(), 0, 0)])


@contextlib.contextmanager
def opened(*variants: Variant, n_ctx: int) -> Iterator[list[Reader]]:
    """Open a reader of up to ``n_ctx`` tokens for each variant, in one activation of the suite."""
    claimer = Claimer()
    with contextlib.ExitStack() as stack:
        stack.enter_context(activate({"plugins": {}, "on_error": "raise"}, {"eval": claimer}))
        yield [_open(stack, variant, claimer, n_ctx) for variant in variants]


def _open(stack: contextlib.ExitStack, variant: Variant, claimer: Claimer, n_ctx: int) -> Reader:
    claimer.claims = variant.claims()
    model = stack.enter_context(loaded(variant.path))
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = n_ctx
    params.n_threads = params.n_threads_batch = 1
    params.flash_attn_type = 1
    ctx = llama_cpp.llama_init_from_model(model, params)
    if ctx is None:
        raise RuntimeError(f"llama.cpp made no context of {n_ctx} tokens for {variant.path}")
    stack.callback(llama_cpp.llama_free, ctx)
    return Reader(ctx, claimer.contexts[-1])


def readings(full: Path, variant: Variant, windows: Windows, name: str = "") -> list[Reading]:
    """Measure a variant at each of its levels, compared with the full model.

    The full model reads each window again in every call, because its distributions are not kept.

    Args:
        full: GGUF of the full model.
        variant: Variant to measure; without levels, only its whole model.
        windows: Test text.
        name: Label of the progress bar.
    """
    levels = range(len(variant.levels)) if variant.levels else [FULL]
    found = np.empty((len(levels), len(Reading._fields), len(windows)))
    with opened(Variant(full), variant, n_ctx=windows.shape[1]) as (reference, reader):
        for i, window in enumerate(tqdm(windows, desc=name, unit="window", disable=None)):
            expected = reference.log_p(window[:-1], FULL)
            for j, level in enumerate(levels):
                log_p = reader.log_p(window[:-1], level)
                found[j, :, i] = read_window(expected, log_p, window[1:])
    return [Reading(*values) for values in found]

"""Run text, or text that the model writes itself, through a model to observe its activations."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
from llama_cpp import llama_cpp
from numpy.ctypeslib import as_array
from numpy.typing import NDArray

from llmaas_hooks import LlmaasError, NativeContext, Tokens, hookimpl
from llmaas_plugins.model.batch_context import BatchContext

__all__ = ["Evaluator", "Listener", "log_softmax"]

_Float = TypeVar("_Float", bound=np.floating[Any])

_LENGTH = 512
"""Tokens of a window, and of a generated sequence.

Both are short because attention results shrink as contexts grow.
"""
_N_SEQUENCES = 4


class Listener:
    """Plugin that tracks contexts created while it is active.

    Use it as ``activate(…, {"name": listener})``.
    """

    def __init__(self) -> None:
        """Start without contexts."""
        self._contexts: dict[int, NativeContext] = {}

    @hookimpl
    def llmaas_native_context(self, context: NativeContext) -> None:
        """Track a new context."""
        self._contexts[context.ctx] = context

    @hookimpl
    def llmaas_context_free(self, ctx: int) -> None:
        """Stop tracking a context."""
        self._contexts.pop(ctx, None)

    def hook_point(self, evaluator: Evaluator) -> NativeContext:
        """Return the native context of an evaluator.

        Raises:
            LlmaasError: The engine has no hook point.
        """
        context = self._contexts.get(int(evaluator.ctx))
        if context is None:
            raise LlmaasError(
                "activations cannot be observed: there is no hook point in the engine. "
                "`llmaas doctor` says why."
            )
        return context


class Evaluator(BatchContext):
    """Context for evaluating tokens.

    Logits of every token are requested, because the last layer skips other tokens.
    """

    def __init__(self, model: Any, n_threads: int = 0) -> None:
        """Create a context of a ``llama_model``; with ``n_threads`` 0 it uses all processors.

        Raises:
            LlmaasError: There is no memory for the context.
        """
        self._length = min(_LENGTH, int(llama_cpp.llama_model_n_ctx_train(model)))
        super().__init__(
            model,
            n_sequences=_N_SEQUENCES,
            n_cells=self._length,
            most_batch=self._length,
            n_threads=n_threads,
            out_of_memory=" to calibrate with. Close other programs, or use a smaller model.",
        )

    def evaluate(self, text: Tokens, n_tokens: int) -> Iterator[int]:
        """Evaluate windows from all over a text; yield the numbers of tokens done."""
        for tokens, _logits in self.predict(text, n_tokens):
            yield len(tokens)

    def predict(self, text: Tokens, n_tokens: int) -> Iterator[tuple[Tokens, NDArray[np.float32]]]:
        """Evaluate windows from all over a text.

        Yield consecutive tokens, and the logits after each of them. Logits have the shape
        ``(n, n_vocab)`` and are valid until the next ones.
        """
        for tokens in self.chosen(text, n_tokens):
            yield from self.read(tokens)

    def read(self, tokens: Tokens) -> Iterator[tuple[Tokens, NDArray[np.float32]]]:
        """Evaluate tokens from position 0 on, at most a window of them.

        Yield consecutive tokens, and the logits after each of them, as ``predict`` does.
        """
        llama_cpp.llama_memory_clear(self._memory, True)
        for at in range(0, len(tokens), self._n_batch):
            part = tokens[at : at + self._n_batch]
            places = range(at, at + len(part))
            yield part, self._decode(part.tolist(), places, [0] * len(part))

    def cut(self, text: Tokens, length: int) -> list[Tokens]:
        """Cut a text into windows of at most ``length`` tokens, each begun as a text is begun.

        The last window is left out if it is less than half as long as the others.
        """
        start = self._start if llama_cpp.llama_vocab_get_add_bos(self._vocab) else []
        n = min(length, self._length) - len(start)
        parts = [text[at : at + n] for at in range(0, len(text), n)]
        if len(parts) > 1 and len(parts[-1]) < n // 2:
            parts.pop()
        return [np.concatenate([np.array(start, np.int32), part]) for part in parts]

    def windows(self, text: Tokens, n_tokens: int) -> NDArray[np.int32]:
        """Return the windows that are evaluated, cut to the same length: ``(n_windows, n)``.

        A last window is left out if it is less than half as long as the others.
        """
        windows = list(self.chosen(text, n_tokens))
        if len(windows[-1]) < len(windows[0]) // 2:
            windows.pop()
        length = min(map(len, windows))
        return np.stack([window[:length] for window in windows])

    def chosen(self, text: Tokens, n_tokens: int) -> Iterator[Tokens]:
        """Yield the windows that ``predict`` evaluates."""
        start = self._start if llama_cpp.llama_vocab_get_add_bos(self._vocab) else []
        for window in _windows(text, n_tokens, self._length - len(start)):
            yield np.concatenate([np.array(start, np.int32), window])

    def generate(self, n_tokens: int, seed: int = 0) -> Iterator[int]:
        """Evaluate text that the model writes at temperature 1; yield numbers of tokens done."""
        for tokens in self._said(n_tokens, seed):
            yield len(tokens)

    def say(
        self, n_tokens: int, seed: int = 0, progress: Callable[[int], None] = lambda _n: None
    ) -> Tokens:
        """Return text that the model writes at temperature 1, one sequence after the other."""
        said: list[list[int]] = [[] for _ in range(_N_SEQUENCES)]
        for tokens in self._said(n_tokens, seed):
            for sequence, token in zip(said, tokens, strict=False):
                sequence.append(token)
            progress(len(tokens))
        text = itertools.chain.from_iterable(said)
        return np.array([token for token in text if token not in self._start], np.int32)

    def _said(self, n_tokens: int, seed: int) -> Iterator[list[int]]:
        """Yield one token of each sequence at a time."""
        chance = np.random.default_rng(seed)
        tokens, positions = np.empty((2, _N_SEQUENCES), np.int32)
        self._restart(range(_N_SEQUENCES), tokens, positions, chance)
        for done in range(0, n_tokens, _N_SEQUENCES):
            n = min(_N_SEQUENCES, n_tokens - done)
            logits = self._decode(tokens[:n].tolist(), positions[:n].tolist(), range(n))
            yield tokens[:n].tolist()
            tokens[:n], positions = _sampled(logits, chance), positions + 1
            ended = [i for i in range(n) if self._is_end(int(tokens[i]), int(positions[i]))]
            self._restart(ended, tokens, positions, chance)

    @property
    def _start(self) -> list[int]:
        """Tokens that a text begins with; empty for some models."""
        bos = int(llama_cpp.llama_vocab_bos(self._vocab))
        return [bos] if bos >= 0 else []

    def _is_end(self, token: int, position: int) -> bool:
        return position == self._length or bool(llama_cpp.llama_vocab_is_eog(self._vocab, token))

    def _restart(
        self,
        sequences: Sequence[int],
        tokens: NDArray[np.int32],
        positions: NDArray[np.int32],
        chance: np.random.Generator,
    ) -> None:
        for i in sequences:
            llama_cpp.llama_memory_seq_rm(self._memory, i, -1, -1)
            tokens[i] = self._start[0] if self._start else chance.integers(self.n_vocab)
            positions[i] = 0

    def _decode(
        self, tokens: Sequence[int], positions: Sequence[int], sequences: Sequence[int]
    ) -> NDArray[np.float32]:
        """Return the logits of a batch, which are valid until the next one."""
        batch = self._batch
        batch.n_tokens = len(tokens)
        for i, (token, position, sequence) in enumerate(
            zip(tokens, positions, sequences, strict=True)
        ):
            batch.token[i], batch.pos[i] = token, position
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
            batch.logits[i] = True
        status = llama_cpp.llama_decode(self.ctx, batch)
        if status:
            raise LlmaasError(f"llama_decode returned {status} while the model was calibrated")
        pointer = llama_cpp.llama_get_logits(self.ctx)
        return as_array(pointer, shape=(len(tokens), self.n_vocab))


def log_softmax(logits: NDArray[_Float]) -> NDArray[_Float]:
    """Return log probabilities by row."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))


def _windows(text: Tokens, n_tokens: int, length: int) -> Iterator[Tokens]:
    """Yield enough windows for ``n_tokens``, at equal distances; a shorter text is used whole."""
    starts = range(0, len(text), length)
    n_windows = -(-n_tokens // length)
    for start in starts[:: max(1, len(starts) // n_windows)][:n_windows]:
        yield text[start : start + length]


def _sampled(logits: NDArray[np.float32], chance: np.random.Generator) -> NDArray[np.int32]:
    """Sample a token for each row."""
    sums = np.exp(logits - logits.max(axis=1, keepdims=True)).cumsum(axis=1, dtype=np.float64)
    drawn = chance.random(len(sums)) * sums[:, -1]
    return (sums <= drawn[:, None]).sum(axis=1, dtype=np.int32)

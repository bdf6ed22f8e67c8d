"""Answers of every setting to prompts, compared with the whole model's to the whole prompts.

A pair's greedy answer begins as the whole model's does, until their first difference. So it is
enough to evaluate the whole model's answer at each pair, and to see where another token would
follow. Cells of any level serve every level: each prompt is evaluated once for each prefill level,
and the decode levels take turns after it. A shorter prompt is one more prompt to evaluate, of which
the whole prompt's answer is expected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from llama_cpp import llama_cpp
from numpy.ctypeslib import as_array
from numpy.typing import NDArray

from llmaas_hooks import LlmaasError, Tokens
from llmaas_plugins.deadlines.answers import Answers, Shorter
from llmaas_plugins.deadlines.margin import first_two
from llmaas_plugins.model.batch_context import BatchContext

__all__ = ["Comparison", "Prompts", "Sequences", "answers_to"]

_MOST_TOGETHER, _MOST_CELLS, _MOST_BATCH = 16, 8192, 512
_CELLS_STEP = 256
"""Cells of a sequence are a multiple of this in llama.cpp."""


class Comparison(NamedTuple):
    """Answers and settings to compare.

    Attributes:
        n_answer: Number of tokens of an answer.
        levels: Levels, widest first.
        at_level: Returns a block inside which a context computes at a level.
        shares: Shares of a prompt to read besides the whole one, longest first; all below 1.
        levels_of_shares: Levels at which these are read, widest first, with the narrowest one.
    """

    n_answer: int
    levels: Sequence[float]
    at_level: Callable[[float], AbstractContextManager[None]]
    shares: Sequence[float] = ()
    levels_of_shares: Sequence[float] = ()


class Prompts(NamedTuple):
    """Prompts to compare answers to.

    Attributes:
        whole: Tokens of each prompt.
        shorter: For each share to compare, the tokens that are read of each prompt.
    """

    whole: Sequence[Tokens]
    shorter: Sequence[Sequence[Tokens]] = ()

    def some(self, rows: Iterable[int]) -> Prompts:
        """Return some of the prompts."""
        whole, *shorter = ([one[i] for i in rows] for one in (self.whole, *self.shorter))
        return Prompts(whole, shorter)


class Sequences(BatchContext):
    """Context with a sequence for each of several prompts.

    Attributes:
        n_together: Number of sequences.
    """

    def __init__(self, model: Any, n_cells: int, n_threads: int = 0) -> None:
        """Create the context of a ``llama_model``.

        Args:
            model: The model.
            n_cells: Most tokens of a prompt and its answer.
            n_threads: Number of threads; 0 is all processors.

        Raises:
            LlmaasError: There is no memory for the context.
        """
        n_cells = -(-n_cells // _CELLS_STEP) * _CELLS_STEP
        self.n_together = max(1, min(_MOST_TOGETHER, _MOST_CELLS // n_cells))
        super().__init__(
            model,
            n_sequences=self.n_together,
            n_cells=n_cells,
            most_batch=_MOST_BATCH,
            n_threads=n_threads,
            out_of_memory=". Close other programs, or use shorter prompts.",
        )

    def is_end(self, token: int) -> bool:
        """Return whether a token ends an answer."""
        return bool(llama_cpp.llama_vocab_is_eog(self._vocab, token))

    def keep(self, sequence: int, n_tokens: int) -> None:
        """Drop the cells of a sequence behind its first tokens."""
        llama_cpp.llama_memory_seq_rm(self._memory, sequence, n_tokens, -1)

    def evaluate(
        self, parts: Sequence[tuple[int, int, Tokens]], *, is_last_only: bool
    ) -> list[list[tuple[int, float]]]:
        """Evaluate tokens; return the most likely next tokens of each part, and their margins.

        Args:
            parts: Sequence, position of the first token, and tokens of each part.
            is_last_only: Whether only what follows a part's last token is wanted.
        """
        rows = [
            (i, sequence, at + k, token, not is_last_only or k == len(tokens) - 1)
            for i, (sequence, at, tokens) in enumerate(parts)
            for k, token in enumerate(tokens.tolist())
        ]
        found: list[list[tuple[int, float]]] = [[] for _ in parts]
        for begin in range(0, len(rows), self._n_batch):
            self._decode(rows[begin : begin + self._n_batch], found)
        return found

    def _decode(
        self, rows: Sequence[tuple[int, int, int, int, bool]], found: list[list[tuple[int, float]]]
    ) -> None:
        batch = self._batch
        batch.n_tokens = len(rows)
        for i, (_, sequence, position, token, is_wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, is_wanted
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        status = llama_cpp.llama_decode(self.ctx, batch)
        if status:
            raise LlmaasError(f"llama_decode returned {status} while answers were compared")
        for i, (part, _, _, _, is_wanted) in enumerate(rows):
            if is_wanted:
                pointer = llama_cpp.llama_get_logits_ith(self.ctx, i)
                found[part].append(first_two(as_array(pointer, shape=(self.n_vocab,))))


class _Whole(NamedTuple):
    """The whole model's answer to a prompt.

    Attributes:
        tokens: The answer, up to a token that ends it.
        margin: Margin of its first token.
    """

    tokens: Tokens
    margin: float


def answers_to(sequences: Sequences, prompts: Prompts, comparison: Comparison) -> Answers:
    """Compare the answers of all settings to some prompts, one for each sequence at most.

    Args:
        sequences: Context of the prepared model, with room for each prompt and answer.
        prompts: The prompts.
        comparison: Answers and settings to compare.
    """
    n_answer, levels, at_level, shares, levels_of_shares = comparison
    with at_level(levels[0]):
        whole = _whole_answers(sequences, prompts.whole, n_answer)
    group = _Group(sequences, comparison, whole)
    firsts = [(int(one.tokens[0]), one.margin) for one in whole]
    leads, margins = group.compared(prompts.whole, levels, firsts)
    leads[:, 0, 0] = n_answer  # even if the sizes of batches decide between two equal tokens
    n_prompt = np.array([len(prompt) for prompt in prompts.whole], np.int32)
    found = Answers(tuple(levels), n_answer, n_prompt, leads, margins)
    if not shares:
        return found
    parts = [group.compared(part, levels_of_shares)[0] for part in prompts.shorter]
    known = Shorter(tuple(shares), tuple(levels_of_shares), np.stack(parts, axis=1))
    return replace(found, shorter=known)


# -- inside --------------------------------------------------------------------------------------


class _Group(NamedTuple):
    """Prompts that are compared together.

    Attributes:
        sequences: Context of the prepared model.
        comparison: Answers to compare.
        whole: Answers of the whole model to the whole prompts.
    """

    sequences: Sequences
    comparison: Comparison
    whole: Sequence[_Whole]

    def compared(
        self,
        prompts: Sequence[Tokens],
        levels: Sequence[float],
        firsts: Sequence[tuple[int, float]] | None = None,
    ) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
        """Return how many tokens of the answers of all pairs of levels equal the whole ones'.

        Args:
            prompts: Tokens that are read of each prompt.
            levels: Levels to compare, widest first.
            firsts: First token of each answer at the first level, and its margin; None if the
                prompts were not read at that level just before.

        Returns:
            Leading tokens that are equal, ``(n, n_levels, n_levels)``; and the margin of the first
            token at each prefill level, ``(n, n_levels)``.
        """
        sequences, (n_answer, _, at_level, *_), whole = self
        n, n_levels = len(prompts), len(levels)
        leads = np.zeros((n, n_levels, n_levels), np.uint8)
        margins = np.zeros((n, n_levels), np.float32)
        for p, prefill in enumerate(levels):
            if p > 0 or firsts is None:
                with at_level(prefill):
                    firsts = _read(sequences, prompts)
            margins[:, p] = [margin for _, margin in firsts]
            alike = [i for i in range(n) if firsts[i][0] == whole[i].tokens[0]]
            for d, decode in enumerate(levels):
                for i in alike:
                    sequences.keep(i, len(prompts[i]))
                with at_level(decode):
                    found = _leads(sequences, prompts, alike, whole, n_answer)
                leads[alike, p, d] = found
        return leads, margins


def _read(sequences: Sequences, prompts: Sequence[Tokens]) -> list[tuple[int, float]]:
    """Evaluate the prompts anew; return the first token of each answer, and its margin."""
    for i in range(sequences.n_together):
        sequences.keep(i, 0)
    parts = [(i, 0, prompt) for i, prompt in enumerate(prompts)]
    return [one[0] for one in sequences.evaluate(parts, is_last_only=True)]


def _whole_answers(sequences: Sequences, prompts: Sequence[Tokens], n_answer: int) -> list[_Whole]:
    firsts = _read(sequences, prompts)
    answers = [[token] for token, _ in firsts]
    for k in range(1, n_answer):
        open_ = [i for i, answer in enumerate(answers) if not sequences.is_end(answer[-1])]
        parts = [(i, len(prompts[i]) + k - 1, np.array(answers[i][-1:], np.int32)) for i in open_]
        found = sequences.evaluate(parts, is_last_only=True)
        for i, ((token, _),) in zip(open_, found, strict=True):
            answers[i].append(token)
    return [
        _Whole(np.array(answer, np.int32), margin)
        for answer, (_, margin) in zip(answers, firsts, strict=True)
    ]


def _leads(
    sequences: Sequences,
    prompts: Sequence[Tokens],
    alike: Sequence[int],
    whole: Sequence[_Whole],
    n_answer: int,
) -> list[int]:
    """Return how many tokens of each answer, whose first one is right, equal the whole model's."""
    parts = [(i, len(prompts[i]), whole[i].tokens[:-1]) for i in alike]
    found = sequences.evaluate(parts, is_last_only=False)
    leads = []
    for i, row in zip(alike, found, strict=True):
        expected = whole[i].tokens[1:].tolist()
        wrong = (k for k, (token, _) in enumerate(row) if token != expected[k])
        leads.append(1 + next(wrong, n_answer - 1))
    return leads
